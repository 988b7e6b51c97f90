"""What the forked workers do. They say on standard output what was acknowledged.

``churn`` does everything until it is killed. The others are single operations: prepare, say
``ready``, wait for a word, do it, say what was acknowledged, say ``done``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random  # what is imported when needed is better imported before a fork
import sqlite_utils  # noqa: F401

import kvdb
import kvdb.check.rebuild
from kvdb.driver import sqlite3
from kvdb.errors import KvdbError
from kvdb.history import RequestRecord
from kvdb.match import Namespace
from kvdb.opening import Options, open_store
from kvdb.sequences import Sequence
from kvdb.store import Store
from tests.crash.crowd import crowd, wide
from tests.crash.oracle import Ack, namespaces
from tests.support import BLOCK, check_prefix, part_bytes, payloads, random_tokens

KEPT_BYTES = 120_000
NAMES = 6


def say(*words: object) -> None:
    """One line in one system call, so that a kill leaves whole lines only."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def hear() -> None:
    input()


def put(store: Store, namespace: Namespace, ack: Ack, first: int = 0) -> bool:
    """Put a chain's blocks from ``first`` on; acknowledge the chain when it is stored."""
    _, prompt, count = ack
    tokens = random_tokens(prompt, count)
    result = store.put(namespace, tokens, payloads(namespace, tokens, first)).wait(30)
    if result.dropped == 0:
        say("ack", *ack)
    return result.dropped == 0


class Churn:
    """Everything that a store can be asked for, at random."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.known = namespaces(store)
        self.random = np.random.default_rng(seed)

    def prompt(self) -> int:
        return int(self.random.integers(0, 1 << 30))

    def run(self) -> None:
        actions = [self.grow] * 4 + [self.bulk, self.name, self.read, self.record]
        actions += [self.evict, self.compact, self.unname]
        while True:
            actions[int(self.random.integers(0, len(actions)))]()

    def grow(self) -> None:
        """A chain block by block, and a tail."""
        prompt = self.prompt()
        layout = str(self.random.choice(list(self.known)))
        namespace = self.known[layout]
        for block in range(int(self.random.integers(1, 4))):
            put(self.store, namespace, (layout, prompt, (block + 1) * BLOCK), block)
        put(self.store, namespace, (layout, prompt, (block + 1) * BLOCK + 5), block + 1)

    def bulk(self) -> None:
        """Chains of both layouts in one group."""
        acks = [(layout, self.prompt(), 3 * BLOCK) for layout in self.known for _ in range(2)]
        with self.store.database.write():  # the writer waits, so that all go into one commit
            tickets = []
            for layout, prompt, count in acks:
                namespace, tokens = self.known[layout], random_tokens(prompt, count)
                tickets.append(self.store.put(namespace, tokens, payloads(namespace, tokens)))
        for ack, ticket in zip(acks, tickets, strict=True):
            if ticket.wait(30).dropped == 0:
                say("ack", *ack)

    def name(self) -> None:
        """A named sequence, its fork, and an append that grows the fork's tail."""
        prompt, namespace = self.prompt(), self.known["plain"]
        if not put(self.store, namespace, ("plain", prompt, BLOCK + 3)):
            return
        tokens = random_tokens(prompt, 2 * BLOCK + 7)
        tip = self.store.match(namespace, tokens[: BLOCK + 3], share_tail=False).tip_hash
        say("naming", f"n{prompt}")
        sequence = self.store.sequence(namespace, tip, name=f"n{prompt}")
        say("name", f"n{prompt}", "plain", prompt, BLOCK + 3)
        fork = sequence.fork()
        spec = namespace.layout.by_name["kv:0"]
        new = part_bytes(spec, tokens, BLOCK + 3, len(tokens))
        if fork.append(tokens[BLOCK + 3 :], {"kv:0": new}).dropped == 0:
            say("ack", "plain", prompt, len(tokens))
        fork.drop()

    def unname(self) -> None:
        rows = self.store.sql(
            "SELECT id, name FROM sequences WHERE name IS NOT NULL ORDER BY id"
        ).rows
        for id_, name in rows[: len(rows) - NAMES] if len(rows) > NAMES else []:
            say("naming", name)
            Sequence(self.store, self.known["plain"], id_, name).drop()

    def read(self) -> None:
        rows = self.store.sql(
            "SELECT hash FROM block_usage WHERE state = 'live' ORDER BY random() LIMIT 1"
        ).rows
        prompt = self.prompt()
        tokens = random_tokens(prompt, 3 * BLOCK)
        with self.store.lease(self.known["plain"], tokens):
            check_prefix(self.store, self.known["plain"], tokens)
        say("read", len(rows))

    def record(self) -> None:
        rows = self.store.sql("SELECT id FROM blocks WHERE state = 'live' LIMIT 5").rows
        touched = tuple(id_ for (id_,) in rows)
        namespace = self.known["plain"].id
        self.store.record(RequestRecord(1, namespace, 9, 4, 0, 5, 2, "partial", touched=touched))
        say("recorded")

    def evict(self) -> None:
        info = self.store.info()
        say("evicting")
        self.store.evict(to_bytes=max(0, info.bytes - info.shard_bytes + KEPT_BYTES))
        say("evicted")

    def compact(self) -> None:
        say("compacting")
        self.store.compact()
        say("compacted")


def churn(path: Path, seed: int, durability: str = "process") -> None:
    with open_store(path, Options(durability=durability)) as store:
        say("open")
        Churn(store, seed).run()


# -- single operations ----------------------------------------------------------------------------


@contextmanager
def prepared(path: Path) -> Iterator[tuple[Store, dict[str, Namespace]]]:
    """An open store, ready for its one operation; says which threads there are."""
    with kvdb.open(path) as store:
        known = namespaces(store)
        _ready()
        yield store, known
        say("done")


def _ready() -> None:
    for thread in threading.enumerate():
        # After a fork the main thread's native_id is still that of the parent's.
        main = thread is threading.main_thread()
        say("thread", thread.name, threading.get_native_id() if main else thread.native_id)
    say("ready")
    hear()


def put_one(path: Path) -> None:
    with prepared(path) as (store, known):
        put(store, known["plain"], ("plain", 901, 2 * BLOCK + 3))


def put_bulk(path: Path) -> None:
    with prepared(path) as (store, _):
        Churn(store, 902).bulk()


def evict(path: Path) -> None:
    with prepared(path) as (store, _):
        say("evicting")
        store.evict(to_bytes=0)


def compact(path: Path) -> None:
    with prepared(path) as (store, _):
        store.compact()


def repair(path: Path) -> None:
    with prepared(path) as (store, _):
        store.verify(data=True, repair=True)


def append(path: Path) -> None:
    with prepared(path) as (store, _):
        Churn(store, 903).name()


def read(path: Path) -> None:
    with prepared(path) as (store, known):
        check_prefix(store, known["plain"], random_tokens(0, 3 * BLOCK))


def create(path: Path) -> None:
    _ready()
    with kvdb.open(path):
        say("done")


def rebuild(path: Path) -> None:
    _ready()
    kvdb.rebuild(path)
    say("done")


def close(path: Path) -> None:
    store = kvdb.open(path)
    known = namespaces(store)
    store.record(RequestRecord(1, known["plain"].id, 9, 9, 0, 0, 2, "full"))
    store.flush()
    _ready()
    store.close()
    say("done")


def story(path: Path, durability: str) -> None:
    """A store's whole life, twice opened: what a power cut is played over."""
    options = Options(durability=durability)
    _ready()
    with open_store(path, options) as store:
        known = namespaces(store)
        for block in range(4):
            put(store, known["plain"], ("plain", 1, (block + 1) * BLOCK), block)
        Churn(store, 2).bulk()
        kept = store.match(known["plain"], random_tokens(1, 2 * BLOCK)).tip_hash
        store.sequence(known["plain"], kept, name="kept")
        say("evicting")
        store.evict(to_bytes=0)
        for prompt in range(3, 6):
            for block in range(3):
                put(store, known["plain"], ("plain", prompt, (block + 1) * BLOCK), block)
        Churn(store, 6).name()
        store.compact()
        put(store, known["mixed"], ("mixed", 7, 2 * BLOCK + 3))
    with open_store(path, options) as store:
        known = namespaces(store)
        Churn(store, 8).record()
        Churn(store, 9).bulk()
        with store.lease(known["plain"], random_tokens(3, 3 * BLOCK)):
            store.evict(to_bytes=0)
        store.compact()
        put(store, known["plain"], ("plain", 10, BLOCK))
    say("done")


# -- operations that meet an error ----------------------------------------------------------------


def outcome(action: Callable[[], object]) -> str:
    """``ok``, the name of a typed error, or ``UNTYPED …``."""
    try:
        action()
    except KvdbError as error:
        return type(error).__name__
    except (OSError, sqlite3.Error, RuntimeError, TypeError, ValueError, AttributeError) as error:
        return f"UNTYPED {error!r}"
    return "ok"


def failing(path: Path, operation: str) -> None:
    """One operation while a system call fails, then another put on the same store."""
    if operation in ("create", "rebuild"):
        _ready()
        made: dict[str, Callable[[], object]] = {
            "create": lambda: kvdb.open(path).close(),
            "rebuild": lambda: say("skipped", len(kvdb.rebuild(path).skipped)),
        }
        say("outcome", outcome(made[operation]))
        say("done")
        return
    store = kvdb.open(path)
    known = namespaces(store)
    if operation == "evict":
        say("evicting")
    _ready()
    doing: dict[str, Callable[[], Any]] = {
        "put_one": lambda: put(store, known["plain"], ("plain", 901, 2 * BLOCK + 3)),
        "put_bulk": lambda: Churn(store, 902).bulk(),
        "append": lambda: Churn(store, 903).name(),
        "evict": lambda: store.evict(to_bytes=0),
        "compact": store.compact,
        "repair": lambda: store.verify(data=True, repair=True),
        "read": lambda: check_prefix(store, known["plain"], random_tokens(0, 3 * BLOCK)),
        "close": store.close,
    }
    say("outcome", outcome(doing[operation]))
    if operation != "close":
        say("ready")
        hear()  # the failing is over
        if not put(store, known["plain"], ("plain", 904, BLOCK)):
            say("next put failed")
        say("outcome", outcome(store.close))
    say("done")


# -- what any caller may ask of a store on a disk that does not play along ------------------------


def fill(store: Store, first: int, count: int) -> tuple[list[int], set[str]]:
    """Put chains of 256 KiB; the prompts that were stored whole, and why others were not."""
    namespace, stored, reasons = wide(store), [], set()
    for prompt in range(first, first + count):
        tokens = random_tokens(prompt, 4 * BLOCK)
        result = store.put(namespace, tokens, payloads(namespace, tokens)).wait(60)
        if result.dropped:
            reasons.add((result.reason or "").partition(":")[0])
        else:
            stored.append(prompt)
    return stored, reasons


def readable(store: Store, prompts: list[int]) -> int:
    """How many chains of :func:`fill` read back, each held against the truth."""
    namespace = wide(store)
    tokens = [random_tokens(prompt, 4 * BLOCK) for prompt in prompts]
    return sum(check_prefix(store, namespace, one) == len(one) for one in tokens)


def everything(store: Store, namespace: Namespace, prompt: int) -> dict[str, str]:
    """The outcome of each public verb, none of which may hang or fail untyped."""
    tokens = random_tokens(prompt, 4 * BLOCK)
    verbs: dict[str, Callable[[], object]] = {
        "put": lambda: store.put(namespace, tokens, payloads(namespace, tokens)).wait(60),
        "match": lambda: store.match(namespace, tokens),
        "read": lambda: check_prefix(store, namespace, random_tokens(0, 4 * BLOCK)),
        "lease": lambda: store.lease(namespace, tokens).release(),
        "namespace": lambda: wide(store),
        "namespaces": store.namespaces,
        "info": store.info,
        "evict": lambda: store.evict(to_bytes=0),
        "compact": store.compact,
        "verify": lambda: store.verify(data=True),
        "repair": lambda: store.verify(data=True, repair=True),
        "sql": lambda: store.sql("SELECT count(*) FROM blocks"),
        "flush": lambda: store.flush(30),
    }
    return {verb: outcome(action) for verb, action in verbs.items()}


def disturbed(path: Path) -> None:
    """All verbs while every write fails, then a put when none does."""
    with kvdb.open(path) as store:
        namespace = wide(store)
        fill(store, 0, 3)
        _ready()
        for verb, word in everything(store, namespace, 50).items():
            say("verb", verb, word)
        _ready()
        say("recovered", len(fill(store, 70, 1)[0]))
    say("done")


OPERATIONS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        *(churn, put_one, put_bulk, append, evict, compact, repair, read),
        *(create, rebuild, close, story, failing, disturbed, crowd),
    )
}
