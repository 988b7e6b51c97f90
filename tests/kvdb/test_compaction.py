"""Compaction gives dead bytes back, loses no block, and costs no reader one."""

from __future__ import annotations

import threading
from pathlib import Path

import kvdb
from kvdb import holding
from kvdb.codecs import CODECS
from kvdb.store import Store
from tests.support import (
    BLOCK,
    MIXED,
    check_prefix,
    open_namespace,
    payloads,
    put_all,
    random_tokens,
    shard_files,
)


def store_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in shard_files(path))


def kill_half(store: Store, chains: int) -> None:
    """One shard of many chains, of which every second is evicted."""
    namespace = open_namespace(store, MIXED)
    tickets = []
    with store.database.write():  # keeps the writer waiting, so that all goes into one group
        for seed in range(chains):
            tokens = random_tokens(seed, 2 * BLOCK)
            tickets.append(store.put(namespace, tokens, payloads(namespace, tokens)))
    for ticket in tickets:
        assert ticket.wait(30).dropped == 0
    for seed in range(0, chains, 2):
        tip = store.match(namespace, random_tokens(seed, 2 * BLOCK)).tip_hash
        store.sequence(namespace, tip, name=f"kept {seed}")
    store.evict(to_bytes=0)


def test_mostly_dead_shards_shrink_and_every_live_block_stays(path: Path) -> None:
    for codec in CODECS:
        with kvdb.open(path / codec, codec=codec) as store:
            kill_half(store, 60)
            for seed in range(4, 60, 2):
                rows = store.sql("SELECT id FROM sequences WHERE name = ?", [f"kept {seed}"]).rows
                with store.database.write() as connection:
                    holding.drop_sequence(connection, rows[0][0])
            before = store_bytes(store.path)
            # An eviction that meets held blocks between dead ones asks for compaction itself.
            store.evict(to_bytes=0)
            assert store_bytes(store.path) < before // 2
            namespace = open_namespace(store, MIXED)
            for seed in (0, 2):
                assert check_prefix(store, namespace, random_tokens(seed, 2 * BLOCK)) == 2 * BLOCK
            assert store.verify(data=True).problems == []
            assert store.compact().shards_read == 0


def test_many_small_shards_become_one(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(1, 12 * BLOCK)
    for end in range(BLOCK, 13 * BLOCK, BLOCK):
        put_all(store, namespace, tokens[:end])
    assert len(shard_files(store.path)) == 12
    report = store.compact()
    assert (report.shards_read, report.shards_written) == (12, 1)
    assert len(shard_files(store.path)) == 1
    assert check_prefix(store, namespace, tokens) == 12 * BLOCK
    assert store.verify(data=True).problems == []


def test_what_compaction_wrote_can_be_rebuilt_from(path: Path) -> None:
    tokens = random_tokens(1, 10 * BLOCK + 3)
    with kvdb.open(path) as store:
        namespace = open_namespace(store, MIXED)
        for end in (*range(BLOCK, 11 * BLOCK, BLOCK), len(tokens)):
            put_all(store, namespace, tokens[:end])
        assert store.compact().shards_written == 1
    (path / "index.sqlite").unlink()
    kvdb.rebuild(path)
    with kvdb.open(path) as store:
        assert check_prefix(store, open_namespace(store, MIXED), tokens) == len(tokens)
        assert store.verify(data=True).problems == []


def test_a_damaged_part_is_dropped_not_copied(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(1, 10 * BLOCK)
    for end in range(BLOCK, 11 * BLOCK, BLOCK):
        put_all(store, namespace, tokens[:end])
    file = shard_files(store.path)[0]
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    store.compact()
    assert store.sql("SELECT count(*) FROM evictions WHERE reason = 'damaged'").rows == [(1,)]
    check_prefix(store, namespace, tokens)
    assert store.verify(data=True).problems == []


def test_readers_beside_compaction_and_eviction_lose_no_held_block(store: Store) -> None:
    namespace = open_namespace(store)
    chains = [random_tokens(seed, 6 * BLOCK) for seed in range(6)]
    for tokens in chains:
        for end in range(BLOCK, 7 * BLOCK, BLOCK):
            put_all(store, namespace, tokens[:end])
        store.sequence(namespace, store.match(namespace, tokens).tip_hash)
    done = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not done.is_set():
                for tokens in chains:
                    assert check_prefix(store, namespace, tokens) == 6 * BLOCK
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for seed in range(100, 110):
        for end in range(BLOCK, 4 * BLOCK, BLOCK):
            put_all(store, namespace, random_tokens(seed, 3 * BLOCK)[:end])
        store.compact()
        store.evict(to_bytes=0)
    done.set()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert store.sql("SELECT count(*) FROM evictions WHERE reason <> 'manual'").rows == [(0,)]
