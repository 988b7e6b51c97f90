"""Compaction: give back the bytes of dead parts, and join shards too small to be worth a file.

Live parts are copied, as stored and verified, into one new shard, which is published like any
other; then their rows move in one transaction and the old shards die. Killed at any point, either
the old places hold or the new ones. A reader that finds its shard gone looks the part up again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvdb import index
from kvdb.damage import ReportDamage
from kvdb.driver import Database
from kvdb.errors import disk_error
from kvdb.identity import decode_extra
from kvdb.limit import Limit
from kvdb.reader import Damaged, Location, ShardReader
from kvdb.reservation import Reservations
from kvdb.retention import Retention
from kvdb.shards import ShardBlock, ShardPart, encode_shard

# A shard is mostly dead when less than half of its payload is live.
MOSTLY_DEAD = (
    "SELECT id, namespace_id, live_bytes FROM shards WHERE state = 'live' AND live_parts > 0 "
    "AND live_bytes * 2 < part_bytes ORDER BY part_bytes - live_bytes DESC LIMIT ?"
)
# Shards of one namespace, in order of age, that are small beside what one file may hold.
SMALL = (
    "SELECT id, namespace_id, live_bytes FROM shards WHERE state = 'live' AND live_parts > 0 "
    "AND namespace_id = ? AND nbytes < ? ORDER BY id LIMIT ?"
)
WASTE = (
    "SELECT coalesce(sum(part_bytes - live_bytes), 0) FROM shards "
    "WHERE state = 'live' AND live_bytes * 2 < part_bytes"
)
LIVE_PARTS = """
SELECT b.id, b.hash, coalesce(f.hash, zeroblob(32)), b.depth, t.tokens, t.extra, b.origin, b.exact,
    u.digest, b.token_count, p.part, p.shard_id, s.uuid, p.offset, p.nbytes, p.raw_nbytes, p.codec,
    p.checksum
FROM parts AS p JOIN shards AS s ON s.id = p.shard_id
JOIN blocks AS b ON b.id = p.block_id
JOIN block_tokens AS t ON t.block_id = b.id
LEFT JOIN blocks AS f ON f.id = b.parent_id
LEFT JOIN builds AS u ON u.id = b.build_id
WHERE p.shard_id IN (SELECT value FROM json_each(?)) ORDER BY p.shard_id, p.offset
"""
MOVE_PART = (
    "UPDATE parts SET shard_id = ?, offset = ? "
    "WHERE block_id = ? AND part = ? AND shard_id = ? AND offset = ?"
)
SOURCES = 64


@dataclass(slots=True)
class CompactionReport:
    """Shards read and written, and the bytes given back (those of the old less the new)."""

    shards_read: int = 0
    shards_written: int = 0
    freed_bytes: int = 0


@dataclass(slots=True)
class _Moved:
    """A block on its way: what it is, its live parts, and where each lay (shard row, offset)."""

    row: tuple[Any, ...]
    parts: list[ShardPart] = field(default_factory=list)
    origins: list[tuple[int, int]] = field(default_factory=list)

    def block(self) -> ShardBlock:
        hash_, parent, depth, tokens, extra, origin, exact, build, count = self.row
        return ShardBlock(
            hash_,
            parent,
            depth,
            index.tokens_from_blob(tokens),
            tuple(decode_extra(extra)),
            origin,
            bool(exact),
            build,
            tuple(self.parts),
            0 if tokens else count,
        )


class Compactor:
    """See the module. Works in the room that the limit leaves; safe in several processes."""

    def __init__(
        self,
        database: Database,
        limit: Limit,
        reader: ShardReader,
        reservations: Reservations,
        keep: Retention,
        report_damage: ReportDamage,
    ) -> None:
        self._database = database
        self._limit = limit
        self._reader = reader
        self._reservations = reservations
        self._retention = keep
        self._report_damage = report_damage

    def waste(self) -> int:
        """Bytes that compacting mostly dead shards would give back."""
        with self._database.read() as connection:
            return int(connection.execute(WASTE).fetchone()[0])

    def run(
        self,
        *,
        small: bool = True,
        progress: Callable[[CompactionReport], None] | None = None,
    ) -> CompactionReport:
        """Compact mostly dead shards, then (with ``small``) join small ones, until none is left
        or no room is. May be interrupted at any point."""
        report = CompactionReport()
        tried: set[tuple[int, ...]] = set()
        while True:
            sources = self._choose(small)
            if not sources or sources in tried or not self._compact(sources, report):
                return report
            tried.add(sources)
            if progress is not None:
                progress(report)

    def rewrite(self, shard_id: int) -> bool:
        """Copy the live parts of a shard into a new one, which is described from the index. False
        when there is no room."""
        return self._compact((shard_id,), CompactionReport())

    def _choose(self, small: bool) -> tuple[int, ...]:
        """Shards of one namespace whose live parts fit into one new shard."""
        with self._database.read() as connection:
            rows = connection.execute(MOSTLY_DEAD, (SOURCES,)).fetchall()
            if rows:
                chosen = self._fitting([row for row in rows if row[1] == rows[0][1]])
                return tuple(chosen)
            if not small:
                return ()
            for (namespace_id,) in connection.execute("SELECT id FROM namespaces").fetchall():
                rows = connection.execute(
                    SMALL, (namespace_id, self._limit.shard_bytes // 8, SOURCES)
                ).fetchall()
                chosen = self._fitting(rows)
                # Only where it makes far fewer files: else every run would copy the same again.
                if len(chosen) >= 8:
                    return tuple(chosen)
        return ()

    def _fitting(self, rows: Sequence[tuple[int, int, int]]) -> list[int]:
        chosen: list[int] = []
        size = 0
        for shard_id, _, live_bytes in rows:
            if chosen and size + live_bytes > self._limit.shard_bytes:
                break
            chosen.append(shard_id)
            size += live_bytes
        return chosen

    def _compact(self, sources: Sequence[int], report: CompactionReport) -> bool:
        """Copy the live parts of ``sources`` into one new shard; False when there is no room."""
        with self._database.read() as connection:
            (namespace_id,) = connection.execute(
                "SELECT namespace_id FROM shards WHERE id = ?", (sources[0],)
            ).fetchone() or (None,)
            if namespace_id is None:
                return True
            record = index.namespace_record(connection, namespace_id)
            rows = connection.execute(LIVE_PARTS, (json.dumps(sources),)).fetchall()
        moved = self._read(rows)
        if not moved:
            return True  # all of it was damaged or evicted meanwhile
        blocks = list(moved.values())
        buffers, placed, nbytes = encode_shard(record, [item.block() for item in blocks])
        self._reservations.retry()
        with self._database.write() as connection:
            if self._reservations.excess(connection, nbytes) > 0:
                return False
            place = self._reservations.reserve(connection, namespace_id, nbytes)
        try:
            self._reservations.publish(place, buffers)
        except OSError as error:
            self._reservations.abandon([place])
            raise disk_error(self._limit.root, error) from error
        part_bytes = sum(part.nbytes for block in placed for part in block.parts)
        with self._database.write(durable=True) as connection:
            connection.execute(index.PUBLISH_SHARD, (nbytes, part_bytes, place.id))
            for (block_id, item), block in zip(moved.items(), placed, strict=True):
                connection.executemany(
                    MOVE_PART,
                    [
                        (place.id, part.offset, block_id, part.part, old, offset)
                        for part, (old, offset) in zip(block.parts, item.origins, strict=True)
                    ],
                )
            dead = index.kill_if_empty(connection, [*sources, place.id])
        report.shards_read += len(sources)
        report.shards_written += 1
        report.freed_bytes += self._retention.remove_dead(dead) - nbytes
        return True

    def _read(self, rows: Sequence[tuple[Any, ...]]) -> dict[int, _Moved]:
        """The parts' stored bytes, verified, by block; what is damaged is dropped and said."""
        moved: dict[int, _Moved] = {}
        for row in rows:
            block_id, hash_, part, shard_id = row[0], row[1], row[10], row[11]
            place = Location(block_id, hash_, part, *row[12:])
            try:
                stored = self._reader.read_stored(place)
            except Damaged as damage:
                self._report_damage(place, damage)
                continue
            item = moved.setdefault(block_id, _Moved(row[1:10]))
            item.parts.append(
                ShardPart(
                    part, place.codec, place.nbytes, place.raw_nbytes, place.checksum, stored=stored
                )
            )
            item.origins.append((shard_id, place.offset))
        return moved
