"""One of several processes that do everything to one store at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvdb
from kvdb.history import RequestRecord
from kvdb.layout import LayerSpec, Layout, TensorSpec
from kvdb.match import Namespace
from kvdb.store import Store
from tests.support import BLOCK, check_prefix, open_namespace, payloads, random_tokens

# 64 KiB a block, and few prompts: what is put is often there already, or was evicted.
WIDE = Layout((LayerSpec("KVCache", (TensorSpec("keys", "F32", (1, 1, 1024), 2),)),))
PROMPTS = 60
MAX_BYTES = 16 << 20


def wide(store: Store) -> Namespace:
    return open_namespace(store, WIDE)


class Member:
    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.namespace = wide(store)
        self.random = np.random.default_rng(seed)
        self.dropped: dict[str, int] = {}

    def tokens(self) -> np.ndarray:
        prompt = int(self.random.integers(0, PROMPTS))
        return random_tokens(prompt, int(self.random.integers(1, 5)) * BLOCK)

    def put(self) -> None:
        tokens = self.tokens()
        made = payloads(self.namespace, tokens)
        result = self.store.put(self.namespace, tokens, made).wait(60)
        if result.reason is not None:
            self.dropped[result.reason] = self.dropped.get(result.reason, 0) + 1

    def match(self) -> None:
        self.store.match(self.namespace, self.tokens())

    def read(self) -> None:
        tokens = self.tokens()
        with self.store.lease(self.namespace, tokens):
            check_prefix(self.store, self.namespace, tokens)

    def read_unheld(self) -> None:
        check_prefix(self.store, self.namespace, self.tokens())

    def fork(self) -> None:
        lease = self.store.lease(self.namespace, self.tokens())
        assert lease.sequence is not None
        fork = lease.sequence.fork()
        lease.release()
        fork.drop()

    def record(self) -> None:
        blocks = self.store.match(self.namespace, self.tokens()).blocks
        ids = tuple(block.id for block in blocks)
        self.store.record(RequestRecord(1, self.namespace.id, 1, 1, 0, 0, 1, "full", touched=ids))

    def evict(self) -> None:
        self.store.evict(to_bytes=MAX_BYTES * 3 // 4)

    def compact(self) -> None:
        self.store.compact()

    def verify(self) -> None:
        report = self.store.verify(sample=2)
        assert report.problems == [], report.problems

    def run(self, operations: int) -> dict[str, list[float]]:
        often: list[Callable[[], None]] = [self.put] * 8 + [self.read] * 5
        often += [self.match, self.read_unheld, self.fork, self.record]
        seldom: list[Callable[[], None]] = [self.evict, self.compact, self.verify]
        took: dict[str, list[float]] = {}
        for _ in range(operations):
            choice = seldom if self.random.random() < 0.03 else often
            action = choice[int(self.random.integers(0, len(choice)))]
            started = time.perf_counter()
            action()
            took.setdefault(action.__name__, []).append(time.perf_counter() - started)
        return took


def crowd(path: Path, seed: int, operations: int) -> None:
    """Any error ends it, unsaid: then there is no last line."""
    with kvdb.open(path) as store:
        member = Member(store, seed)
        print("ready", flush=True)
        input()
        took = member.run(operations)
    print(json.dumps({"took": took, "dropped": member.dropped}), flush=True)
