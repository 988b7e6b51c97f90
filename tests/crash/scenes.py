"""Stores in a state worth hurting, made once, and the thread that each operation runs on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import kvdb
from tests.crash.oracle import Ack, Ledger, namespaces
from tests.crash.zygote import Zygote
from tests.support import BLOCK, payloads, random_tokens, shard_files

# Operation: the thread whose system calls are hurt.
THREADS = {
    "put_one": "kvdb-writer",
    "put_bulk": "kvdb-writer",
    "append": "kvdb-writer",
    "evict": "MainThread",
    "compact": "MainThread",
    "create": "MainThread",
    "rebuild": "MainThread",
    "repair": "MainThread",
    "close": "MainThread",
    "read": "MainThread",
}
CHAINS = 3
BLOCKS = 4


def make_plain(path: Path) -> Ledger:
    """Chains of one shard a block, so that there is something to join; one mostly dead shard."""
    acks: set[Ack] = set()
    with kvdb.open(path) as store:
        known = namespaces(store)
        for prompt in range(CHAINS):
            for block in range(BLOCKS):
                tokens = random_tokens(prompt, (block + 1) * BLOCK)
                made = payloads(known["plain"], tokens, block)
                assert store.put(known["plain"], tokens, made).wait(30).dropped == 0
                acks.add(("plain", prompt, len(tokens)))
        dying = [("mixed", 50 + number, BLOCK) for number in range(5)]
        with store.database.write():  # the writer waits, so that all go into one shard
            tickets = []
            for layout, prompt, count in dying:
                tokens = random_tokens(prompt, count)
                tickets.append(store.put(known[layout], tokens, payloads(known[layout], tokens)))
        assert all(ticket.wait(30).dropped == 0 for ticket in tickets)
        kept = store.match(known["mixed"], random_tokens(50, BLOCK)).tip_hash
        holds = [store.sequence(known["mixed"], kept, name="kept")]
        for prompt in range(CHAINS):
            tip = store.match(known["plain"], random_tokens(prompt, BLOCKS * BLOCK)).tip_hash
            holds.append(store.sequence(known["plain"], tip))
        store.evict(to_bytes=0)
        for hold in holds[1:]:
            hold.drop()
        acks.add(dying[0])
    return Ledger(acks, {"kept": dying[0]}, evicting=True)


def make_unclean(zygote: Zygote, path: Path) -> Ledger:
    """As plain, then a process died: its newest commits are in the WAL only, and it held things."""
    ledger = make_plain(path)
    worker = zygote.start("churn", path, seed=7)
    heard = 0
    while heard < 5:
        line = worker.line()
        assert line is not None
        heard += ledger.hear([line])
    worker.kill()
    ledger.hear(worker.rest())
    worker.wait()
    assert (path / "index.sqlite-wal").stat().st_size > 0
    return ledger


def make_damaged(path: Path) -> Ledger:
    """As plain, with a cut shard, a flipped bit, a missing shard and a stray file."""
    ledger = make_plain(path)
    files = shard_files(path)
    for file in files[:3]:
        file.chmod(0o600)
    files[0].write_bytes(files[0].read_bytes()[:100])
    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    files[1].write_bytes(data)
    files[2].unlink()
    stray = path / "tmp" / ("ab" * 16 + ".safetensors")
    stray.write_bytes(b"left by a crash")
    os.utime(stray, (1, 1))
    ledger.acks = {ack for ack in ledger.acks if _whole(path, ack)}
    ledger.names = {}
    ledger.doubtful = {"kept"}
    return ledger


def _whole(path: Path, ack: Ack) -> bool:
    layout, prompt, count = ack
    tokens = random_tokens(prompt, count)
    with kvdb.open(path, read_only=True) as store:
        namespace = namespaces(store)[layout]
        match = store.match(namespace, tokens)
        parts = [part for block in match.blocks for part in block.parts.values()]
        return all(store.read_part(part) is not None for part in parts)


class Scenes:
    """Copies of prepared stores, by operation."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        makers: dict[str, Callable[[Path], Ledger]] = {
            "plain": make_plain,
            "unclean": lambda path: make_unclean(zygote, path),
            "damaged": make_damaged,
        }
        self._folder = folder
        self._ledgers = {name: make(folder / name) for name, make in makers.items()}

    def copy(self, operation: str, path: Path) -> Ledger:
        """Put a fresh store for ``operation`` at ``path``."""
        shutil.rmtree(path, ignore_errors=True)
        if operation == "create":
            return Ledger()
        name = {"rebuild": "unclean", "repair": "damaged"}.get(operation, "plain")
        shutil.copytree(self._folder / name, path)
        if operation == "close":
            (path / "index.backup").unlink(missing_ok=True)
        made = self._ledgers[name]
        return Ledger(set(made.acks), dict(made.names), set(made.doubtful), True, made.swept)
