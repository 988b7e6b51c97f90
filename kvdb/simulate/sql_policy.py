"""kvdb's own retention as a policy to replay: the real statements over the real tables, in memory.

Only payloads are missing: a store of blocks of equal size, counted in blocks instead of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdb import index, retention
from kvdb.driver import Connection, apply_migrations, immediate, sqlite3

ADD_NAMESPACE = (
    "INSERT INTO namespaces (fingerprint, model, identity, layout, block_tokens, salt, "
    "created_at, used_at) VALUES (zeroblob(32), '', '{}', '{}', 16, x'', 0, 0)"
)
DROP_EVICTIONS = "DELETE FROM evictions"
LIVE_HASHES = "SELECT hash FROM blocks WHERE state = 'live'"


def key_hash(key: int) -> bytes:
    """What stands for a block hash: keys are unique already."""
    return key.to_bytes(32, "big")


class SqlPolicy:
    """Holds at most ``capacity`` blocks. One transaction a request; it fails as a whole."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.connection: Connection = sqlite3.connect(
            ":memory:", isolation_level=None, cached_statements=256
        )
        self.connection.execute("PRAGMA foreign_keys = ON")
        apply_migrations(self.connection)
        self.connection.execute(ADD_NAMESPACE)

    def request(self, chain: Sequence[int]) -> int:
        """Look a chain up, store what is missing, and return how many blocks hit."""
        with immediate(self.connection) as connection:
            return self._request(connection, chain)

    def _request(self, connection: Connection, chain: Sequence[int]) -> int:
        tick = index.next_tick(connection)
        hit: list[int] = []
        for key in chain:
            row = index.find_block(connection, key_hash(key))
            if row is None or row.state != "live":
                break
            hit.append(row.id)
        hits = len(hit)
        retention.touch(connection, hit, tick)
        if hit:
            index.add_hold(connection, hit[-1])  # and with it all before it
        missing = [index.find_block(connection, key_hash(key)) for key in chain[hits:]]
        for row in missing:
            if row is not None:
                retention.learn(connection, row, tick)
        self._evict(connection, self._live(connection) + len(missing) - self.capacity)
        room = max(self.capacity - self._live(connection), 0)
        parent = hit[-1] if hit else None
        for depth, row in enumerate(missing[:room], hits):
            if row is None:
                parent = index.insert_block(
                    connection,
                    hash_=key_hash(chain[depth]),
                    parent_id=parent,
                    namespace_id=1,
                    depth=depth,
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
        if hit:
            index.drop_hold(connection, hit[-1])
        retention.forget(connection)
        connection.execute(DROP_EVICTIONS)  # nothing here reads them, and a store trims them too
        return hits

    def _evict(self, connection: Connection, blocks: int) -> None:
        if blocks <= 0:
            return
        for done, victim in enumerate(retention.victims(connection), 1):
            index.evict_block(connection, victim, now=0, reason="limit")
            if done == blocks:
                return

    def _live(self, connection: Connection) -> int:
        counters = index.counters(connection)
        return counters["live_cold"] + counters["live_hot"]

    def live_hashes(self) -> set[bytes]:
        return {row[0] for row in self.connection.execute(LIVE_HASHES)}

    def close(self) -> None:
        self.connection.close()
