"""The retention in SQL decides as its reference over dicts does, and both beat plain LRU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvdb import index, retention
from kvdb.driver import Connection, Database, immediate
from kvdb.identity import as_tokens, block_hash
from kvdb.locks import WriterLock
from tests.kvdb.reference_policy import Retention as Reference

CAPACITY = 80
NAMESPACE = bytes(32)


class SqlPolicy:
    """Requests over the real tables, without payloads: one block a key, counted in blocks."""

    def __init__(self, path: Path) -> None:
        self._lock = WriterLock(path / "writer.lock")
        self.database = Database(path / "index.sqlite", writer_lock=self._lock)
        self.database.open()
        self.database.migrate()
        with self.database.write() as connection:
            connection.execute(
                "INSERT INTO namespaces (fingerprint, model, identity, layout, block_tokens, "
                "salt, created_at, used_at) VALUES (zeroblob(32), '', '{}', '{}', 16, x'', 0, 0)"
            )

    def request(self, chain: Sequence[int]) -> int:
        with self.database.write() as connection:
            return self._request(connection, chain)

    def _request(self, connection: Connection, chain: Sequence[int]) -> int:
        tick = index.next_tick(connection)
        rows = [index.find_block(connection, key_hash(key)) for key in chain]
        hits = next((n for n, row in enumerate(rows) if row is None or row.state != "live"), None)
        hits = len(rows) if hits is None else hits
        live = [row for row in rows[:hits] if row is not None]
        retention.touch(connection, [row.id for row in live], tick)
        tip = live[-1].id if live else None
        if tip is not None:
            index.add_hold(connection, tip)
        for row in rows[hits:]:
            if row is not None:
                retention.learn(connection, row, tick)
        room = CAPACITY - self.live(connection)
        self._evict(connection, len(chain) - hits - room)
        room = CAPACITY - self.live(connection)
        parent = tip
        for key, row in list(zip(chain, rows, strict=True))[hits:][: max(room, 0)]:
            if row is None:
                parent = index.insert_block(
                    connection,
                    hash_=key_hash(key),
                    parent_id=parent,
                    namespace_id=1,
                    depth=chain.index(key),
                    token_count=16,
                    origin="prefill",
                    exact=False,
                    build_id=None,
                    now=0,
                    tick=tick,
                    tokens=b"",
                    extra=b"",
                )
            else:
                retention.touch(connection, [row.id], tick)
                index.revive_block(connection, row, b"", b"")
                parent = row.id
        if tip is not None:
            index.drop_hold(connection, tip)
        retention.forget(connection)
        return hits

    def _evict(self, connection: Connection, blocks: int) -> None:
        for done, victim in enumerate(retention.victims(connection)):
            if done >= blocks:
                return
            index.evict_block(connection, victim, now=0, reason="limit")

    def live(self, connection: Connection) -> int:
        counters = index.counters(connection)
        return counters["live_cold"] + counters["live_hot"]

    def live_keys(self) -> set[bytes]:
        with self.database.read() as connection:
            rows = connection.execute("SELECT hash FROM blocks WHERE state = 'live'").fetchall()
        return {row[0] for row in rows}

    def close(self) -> None:
        self.database.close()
        self._lock.close()


def key_hash(key: int) -> bytes:
    return block_hash(NAMESPACE, bytes(32), as_tokens([key]))


def conversations(seed: int, requests: int) -> list[list[int]]:
    """Growing conversations of uneven popularity, each over one of three system prompts."""
    random = np.random.default_rng(seed)
    heads = [[1000 * h + n for n in range(int(random.integers(2, 6)))] for h in range(3)]
    lengths = [1] * 60
    made = []
    for _ in range(requests):
        which = min(int(random.zipf(1.3)) - 1, 59)
        lengths[which] += int(random.integers(0, 2))
        own = [10_000 + 100 * which + n for n in range(min(lengths[which], 12))]
        made.append(heads[which % 3] + own)
    return made


@pytest.mark.parametrize("seed", [1, 2])
def test_sql_and_reference_keep_the_same_blocks(tmp_path: Path, seed: int) -> None:
    sql, reference = SqlPolicy(tmp_path), Reference(CAPACITY)
    for chain in conversations(seed, 250):
        assert sql.request(chain) == reference.request(chain)
    with sql.database.read() as connection:
        assert index.counters(connection)["age_ratio"] == reference.age_ratio
    kept = {key_hash(key) for key, row in reference.by_key.items() if row.state == "live"}  # type: ignore[call-overload]
    assert sql.live_keys() == kept
    assert reference.history > 0
    sql.close()


def test_the_cache_beats_plain_lru_where_scans_flood_it() -> None:
    random = np.random.default_rng(3)
    trace = []
    for scan in range(3000):
        hot = int(random.integers(0, 40))
        trace.append([hot, 100 + hot])
        trace.append([100_000 + 3 * scan, 100_001 + 3 * scan, 100_002 + 3 * scan])
    policy, lru = Reference(CAPACITY), Reference(CAPACITY)
    lru._learn = lambda ghost: None  # type: ignore[method-assign]
    lru.age_ratio = 1 << 20
    hits = [sum(p.request(chain) for chain in trace) for p in (policy, lru)]
    assert hits[0] > 1.5 * hits[1]


def test_a_transaction_that_fails_leaves_the_index_as_it_was(tmp_path: Path) -> None:
    policy = SqlPolicy(tmp_path)
    policy.request([1, 2, 3])
    before = policy.live_keys()
    connection = policy.database.memory_copy()
    with pytest.raises(KeyError), immediate(connection):  # noqa: PT012 - the block is the case
        policy._request(connection, [4, 5])
        raise KeyError("anything")
    assert connection.execute("SELECT count(*) FROM blocks").fetchone() == (len(before),)
    connection.close()
    policy.close()
