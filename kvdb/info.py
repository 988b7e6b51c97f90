"""What a store holds, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdb import index
from kvdb.driver import SQLITE_VERSION, has_wal_reset_bug
from kvdb.limit import volume_bytes
from kvdb.ramtier import RamStats

if TYPE_CHECKING:
    from kvdb.store import Store


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace's totals; sizes in bytes."""

    id: int
    fingerprint: str
    model: str
    block_tokens: int
    live_blocks: int
    live_tokens: int
    live_bytes: int

    @property
    def bytes_per_token(self) -> int | None:
        """Stored bytes of all parts over the tokens of live blocks; None where there are none."""
        return self.live_bytes // self.live_tokens if self.live_tokens else None


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """Totals of a store; sizes in bytes. ``bytes`` counts the whole directory as the limit does,
    ``leftovers`` are shards that a dead process was writing or removing. All requests together took
    ``bytes_read`` from shards and ``bytes_ram`` from RAM; ``ram`` is the RAM tier of this
    process."""

    path: str
    read_only: bool
    bytes: int
    shard_bytes: int
    max_bytes: int
    min_free_bytes: int
    free_bytes: int
    live_blocks: int
    held_holes: int
    remembered_blocks: int
    shards: int
    leftovers: int
    sequences: int
    requests: int
    evictions: int
    processes: int
    wal_bytes: int
    wal_pause_bytes: int
    durability: str
    sqlite_version: str
    wal_reset_bug: bool
    user_version: int
    counters: dict[str, int]
    settings: dict[str, str]
    bytes_read: int
    bytes_ram: int
    ram: RamStats
    namespaces: tuple[NamespaceInfo, ...]


def collect_info(store: Store) -> StoreInfo:
    with store.database.read() as connection:

        def number(sql: str) -> int:
            return int(connection.execute(sql).fetchone()[0])

        counters = index.counters(connection)
        namespaces = tuple(
            NamespaceInfo(id_, fingerprint.hex(), *rest)
            for id_, fingerprint, *rest in connection.execute(
                "SELECT id, fingerprint, model, block_tokens, live_blocks, live_tokens, "
                "live_bytes FROM namespaces ORDER BY id"
            )
        )
        return StoreInfo(
            path=str(store.path),
            read_only=store.read_only,
            bytes=store.limit.used(connection),
            shard_bytes=counters["shard_bytes"],
            max_bytes=store.limit.max_bytes,
            min_free_bytes=store.limit.min_free_bytes,
            free_bytes=volume_bytes(store.path)[1],
            live_blocks=counters["live_cold"] + counters["live_hot"],
            held_holes=number("SELECT count(*) FROM blocks WHERE state = 'evicted' AND refs > 0"),
            remembered_blocks=number(
                "SELECT count(*) FROM blocks WHERE state = 'evicted' AND refs = 0"
            ),
            shards=number("SELECT count(*) FROM shards WHERE state = 'live'"),
            leftovers=number(
                "SELECT count(*) FROM shards WHERE state <> 'live' AND (process_id IS NULL OR "
                "process_id NOT IN (SELECT id FROM processes))"
            ),
            sequences=number("SELECT count(*) FROM sequences"),
            requests=number("SELECT count(*) FROM requests"),
            evictions=number("SELECT count(*) FROM evictions"),
            processes=number("SELECT count(*) FROM processes"),
            wal_bytes=store.database.wal_bytes(),
            wal_pause_bytes=store.limit.wal_pause_bytes,
            durability=store.durability,
            sqlite_version=SQLITE_VERSION,
            wal_reset_bug=has_wal_reset_bug(),
            user_version=number("PRAGMA user_version"),
            counters=counters,
            settings=dict(connection.execute("SELECT key, value FROM settings").fetchall()),
            bytes_read=number("SELECT coalesce(sum(bytes_read), 0) FROM request_totals"),
            bytes_ram=number("SELECT coalesce(sum(bytes_ram), 0) FROM request_totals"),
            ram=store.ram.stats(),
            namespaces=namespaces,
        )
