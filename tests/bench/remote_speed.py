"""Restore from a remote against the plain client's way to the same bytes; what a miss costs.

    python -m tests.bench.remote_speed [--url redis://127.0.0.1:6379] [--blocks 32] [--rounds 7]

By default the remote is a folder, whose plain way is readinto of its files; that of Redis is one
MGET. State of SmolLM2's shape in float32: blocks of 256 tokens, 11.8 MB each. Everything is in the
page cache or in Redis' memory; interleaved, medians; the spread is that of the plain way against
itself. "kept" also puts what comes into the local store, behind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import kvdb
from kvdb.match import Match
from kvdb.remotes.configs import RemoteSpec, new_spec
from kvdb.remotes.found import Found
from kvdb.remotes.packing import keys_of
from kvdb.remotes.tier import attach
from kvdb.restore import Want
from tests.bench.restore_speed import LAYOUT, fill

BLOCK = 256


def share(folder: Path, spec: RemoteSpec, tokens: np.ndarray) -> list[str]:
    """Fill a store and share it; returns the objects' keys."""
    fill(folder / "a", tokens)
    with kvdb.open(folder / "a") as store:
        tier = attach(store, [spec])
        namespace = store.namespaces()[0]
        hashes = store.match(namespace, tokens).hashes
        tier.stored(hashes)
        if not tier.flush(300):
            raise SystemExit("the remote took too long")
        tier.close()
        record = store.describe(namespace)
        return [str(keys_of(h, i, ["kv:0"], record)[0]) for i, h in enumerate(hashes)]


def plain(url: str, keys: list[str]) -> Callable[[], int]:
    """The client's own way to all objects; gives their bytes."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        names = {file.name: file for file in Path(parts.path).rglob("*-*")}
        files = [names[key.rpartition("/")[2]] for key in keys]

        def read() -> int:
            total = 0
            for file in files:
                buffer = np.empty(file.stat().st_size, np.uint8)
                with file.open("rb", buffering=0) as handle:
                    total += handle.readinto(buffer)
            return total

        return read
    import redis

    client = redis.Redis(host=parts.hostname or "127.0.0.1", port=parts.port or 6379)
    found = {key.decode().rpartition("/")[2]: key for key in client.scan_iter("*", count=10_000)}
    mine = [found[key.rpartition("/")[2]] for key in keys]
    return lambda: sum(len(data) for data in client.mget(mine))


def ask(store: kvdb.Store, match: Match) -> Found:
    assert store.remotes is not None
    question = store.remotes.ask(match)
    assert question is not None
    for _, future in question._asked:
        future.result()
    return question.result()


class Restore:
    """One machine without the state, whose restores go through the remote."""

    def __init__(self, folder: Path, spec: RemoteSpec, tokens: np.ndarray) -> None:
        self._folder = folder
        self._spec = spec
        self._tokens = tokens
        self._number = 0
        part = LAYOUT.by_name["kv:0"]
        # Used again, as MLX does its buffers.
        self._views = [
            [np.zeros(t.full_shape(len(tokens) + 256), np.float32) for t in part.tensors]
            for _ in part.layers
        ]

    def __call__(self, kept: bool) -> float:
        """Seconds from the look-up to the last byte in place, in a store that is empty."""
        self._number += 1
        with kvdb.open(self._folder / f"b{self._number}", queue_bytes=4 << 30) as store:
            store.remotes = attach(store, [self._spec])
            namespace = store.namespace(kvdb.ModelIdentity("bench", "bench"), LAYOUT)
            began = time.perf_counter()
            match = store.match(namespace, self._tokens)
            found = ask(store, match)
            extended = match.extended(found.elsewhere())
            fetching = store.remotes.fetching(found, lambda _: "use", fill=kept)
            want = Want("kv:0", self._views, tuple(range(len(extended.blocks))))
            result = store.read_parts(extended, [want], fetching)
            seconds = time.perf_counter() - began
            assert not result.lost, result.lost
            assert extended.token_count == len(self._tokens)
            store.flush()
            return seconds


def miss(folder: Path, spec: RemoteSpec, rounds: int) -> dict[str, float]:
    """Milliseconds of look-ups of prompts that nobody has, here alone and with the remote."""
    random = np.random.default_rng(5)
    took: dict[str, list[float]] = {"local": [], "asked": [], "remembered": []}
    with kvdb.open(folder / "miss") as store:
        store.remotes = attach(store, [spec])
        namespace = store.namespace(kvdb.ModelIdentity("bench", "bench"), LAYOUT)
        for round_ in range(rounds + 1):
            tokens = random.integers(0, 9000, 128 * BLOCK, dtype=np.uint32)
            calls: dict[str, Callable[[], Any]] = {
                "local": lambda tokens=tokens: store.match(namespace, tokens),
                "asked": lambda tokens=tokens: ask(store, store.match(namespace, tokens)),
                "remembered": lambda tokens=tokens: ask(store, store.match(namespace, tokens)),
            }
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                if round_:  # the first one connects
                    took[name].append((time.perf_counter() - began) * 1e3)
    medians = {name: statistics.median(times) for name, times in took.items()}
    return {
        "local_ms": medians["local"],
        "miss_ms_more": medians["asked"] - medians["local"],
        "remembered_ms_more": medians["remembered"] - medians["local"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of an empty remote (default: a folder)")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    tokens = np.random.default_rng(1).integers(0, 9000, options.blocks * BLOCK, dtype=np.uint32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "team").mkdir()
        url = options.url or (folder / "team").as_uri()
        spec = new_spec("bench", url, budget_ms=60_000)
        client = plain(url, share(folder, spec, tokens))
        restore = Restore(folder, spec, tokens)
        took: dict[str, list[float]] = {"plain": [], "plain_again": [], "read": [], "kept": []}
        nbytes = client()
        restore(False)
        for _ in range(options.rounds):
            for which in ("plain", "plain_again"):
                began = time.perf_counter()
                client()
                took[which].append(time.perf_counter() - began)
            took["read"].append(restore(False))
            took["kept"].append(restore(True))
        medians = {which: statistics.median(times) for which, times in took.items()}
        print(
            json.dumps(
                {
                    "mb": round(nbytes / 1e6, 1),
                    **{f"{k}_mb_s": round(nbytes / 1e6 / v) for k, v in medians.items()},
                    "read_ratio": round(medians["plain"] / medians["read"], 3),
                    "kept_ratio": round(medians["plain"] / medians["kept"], 3),
                    "spread": round(medians["plain_again"] / medians["plain"], 3),
                    **{k: round(v, 3) for k, v in miss(folder, spec, 20).items()},
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
