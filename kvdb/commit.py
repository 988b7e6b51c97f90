"""Stores a group of puts: encode, reserve, publish files, then make the blocks visible.

The order is the promise: room is reserved before a file exists (kvdb/reservation.py), and blocks
are inserted only after the file is published.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvdb import holding, index, thinning
from kvdb.answers import trim_answers
from kvdb.clock import Environment
from kvdb.codecs import Codec
from kvdb.driver import Connection, Database, sqlite3
from kvdb.history import trim_history
from kvdb.identity import ROOT_PARENT, Checksum, extra_by_block
from kvdb.limit import Limit
from kvdb.ramtier import PartKey, RamTier, admit
from kvdb.reader import ShardReader
from kvdb.reservation import Reservation, Reservations
from kvdb.retention import Retention
from kvdb.room import Room
from kvdb.shards import (
    Bytes,
    NamespaceRecord,
    ShardBlock,
    ShardPart,
    encode_shard,
    split_runs,
)
from kvdb.spread import Spreader
from kvdb.visible import Incoming, Visible, missing_parts
from kvdb.writer import Payload, PutJob, Task, Ticket

log = logging.getLogger("kvdb.writer")


class _Missing(NamedTuple):
    """What of a payload is to be stored: the names of its parts, and what its block is."""

    job: PutJob
    payload: Payload
    hash: bytes
    parent: bytes
    extra: tuple[bytes, ...]
    names: Sequence[str]


@dataclass(slots=True)
class _Staged:
    """A new block, or new parts of one, on its way into a shard."""

    job: PutJob
    payload: Payload
    block: ShardBlock


@dataclass(slots=True, eq=False)
class _Shard:
    """A shard to be written."""

    namespace_id: int
    record: NamespaceRecord
    staged: list[_Staged]
    buffers: list[memoryview]
    nbytes: int

    @property
    def part_bytes(self) -> int:
        return sum(part.nbytes for member in self.staged for part in member.block.parts)

    def drop(self, reason: str) -> None:
        for member in self.staged:
            member.job.ticket.drop(reason)


class _Placed(NamedTuple):
    """A shard for which room is reserved."""

    place: Reservation
    shard: _Shard


class Committer:
    """See the module. One per open store; called by the writer's thread only."""

    def __init__(
        self,
        database: Database,
        limit: Limit,
        keep: Retention,
        environment: Environment,
        codec: Codec,
        reservations: Reservations,
        room: Room,
        reader: ShardReader,
        spreader: Spreader,
        ram: RamTier[Bytes],
    ) -> None:
        self._database = database
        self._limit = limit
        self._retention = keep
        self._environment = environment
        self._codec = codec
        self._reservations = reservations
        self._room = room
        self._reader = reader
        self._spreader = spreader
        self._ram = ram
        self._pinned = False
        # Told the hashes of blocks that were computed here, once they are stored.
        self.announce: Callable[[Sequence[bytes]], None] | None = None

    def commit(self, jobs: Sequence[PutJob], tasks: Sequence[Task]) -> None:
        """Store ``jobs`` and run ``tasks`` in the same transaction. Raises KvdbError or OSError
        when the index cannot be written; files that were begun are then removed."""
        self._reservations.retry()
        jobs, tasks = self._unless_pinned(jobs, tasks)
        if not jobs and not tasks:
            return
        shards = list(self._lay_out(self._stage(jobs)))
        placed: list[_Placed] = []
        try:
            for shard in shards:
                placed += self._reserve(shard, jobs)
            published = self._publish(placed)
            with self._database.write() as connection:
                for place, shard in published:
                    connection.execute(
                        index.PUBLISH_SHARD, (shard.nbytes, shard.part_bytes, place.id)
                    )
                visible = _Jobs(connection, self._environment.now_us(), published)
                visible.insert(jobs)
                for counter, by in visible.dropped(jobs, self._limit.block_bytes).items():
                    index.bump(connection, counter, by)
                for task in tasks:
                    _run_task(connection, task)
                if tasks:
                    trim_history(connection, self._limit.history_rows)
                    now = self._environment.now_us()
                    trim_answers(connection, self._limit.answer_bytes, now)
                left = [*visible.emptied, *(place.id for place, _ in published)]
                dead = index.kill_if_empty(connection, left)
        except BaseException:
            self._reservations.abandon(place for place, _ in placed)
            raise
        for ticket, stored in visible.counted:
            ticket.count(stored=int(stored), present=int(not stored))
        self._admit(published)
        if self.announce is not None and visible.computed:
            self.announce(visible.computed)
        if dead:
            self._retention.sweep_dead()
        self._reader.sweep()

    def _admit(self, published: Sequence[_Placed]) -> None:
        """Let new blocks into the RAM tier as they are: being put was their first use."""
        if not (self._ram.budget and self._codec.lossless):
            return
        for _, shard in published:
            for member in shard.staged:
                for part in member.block.parts:
                    raw = member.payload.parts[part.part]
                    key = PartKey(member.block.hash, part.part, part.checksum)
                    admit(self._ram, key, raw)

    def _unless_pinned(
        self, jobs: Sequence[PutJob], tasks: Sequence[Task]
    ) -> tuple[Sequence[PutJob], Sequence[Task]]:
        """While a reader from outside pins the WAL, history pauses first, then puts."""
        wal, pause = self._database.wal_bytes(), self._limit.wal_pause_bytes
        if wal <= pause or self._database.checkpoint(wait=False):
            self._pinned = False
            return jobs, tasks
        if not self._pinned:
            self._pinned = True
            log.warning("a reader from outside keeps the WAL at %d bytes: history pauses", wal)
        if wal <= 2 * pause:
            return jobs, ()
        for job in jobs:
            job.ticket.drop("wal_pinned")
        return (), ()

    # -- staging -----------------------------------------------------------------------------

    def _stage(self, jobs: Sequence[PutJob]) -> list[_Staged]:
        """Encode what is not stored yet. Blocks whose parent is neither stored nor staged are
        dropped with the rest of their chain."""
        missing: list[_Missing] = []
        ahead: set[bytes] = set()
        seen: set[tuple[bytes, str]] = set()
        with self._database.read() as connection:
            for job in jobs:
                extras = extra_by_block(job.extra_keys, job.namespace.block_tokens)
                for payload in job.payloads:
                    hash_ = job.hashes[payload.index]
                    parent = job.hashes[payload.index - 1] if payload.index else ROOT_PARENT
                    if parent != ROOT_PARENT and parent not in ahead:
                        row = index.find_block(connection, parent)
                        if row is None or not row.held:
                            job.ticket.drop("parent_missing")
                            break
                    names = missing_parts(connection, _incoming(job, payload), payload.parts)
                    names = [name for name in names if (hash_, name) not in seen]
                    if payload.nbytes > self._limit.block_bytes:
                        job.ticket.drop("too_large")
                        break
                    if names:
                        seen.update((hash_, name) for name in names)
                        extra = tuple(extras.get(payload.index, ()))
                        missing.append(_Missing(job, payload, hash_, parent, extra, names))
                    ahead.add(hash_)
        return list(self._spreader.map(self._encode, missing))

    def _encode(self, missing: _Missing) -> _Staged:
        job, payload, hash_, parent, extra, names = missing
        parts = []
        for name in names:
            raw = payload.parts[name]
            stored, codec = self._codec.encode(raw), self._codec.name
            if stored.nbytes >= raw.nbytes:
                stored, codec = raw, "raw"
            checksum = Checksum(hash_, name)
            checksum.update(stored.data)
            parts.append(
                ShardPart(name, codec, stored.nbytes, raw.nbytes, checksum.digest(), stored=stored)
            )
        block = ShardBlock(
            hash_,
            parent,
            payload.index,
            job.block_tokens(payload.index),
            extra,
            job.origin,
            job.exact,
            job.build_digest,
            tuple(parts),
        )
        return _Staged(job, payload, block)

    def _lay_out(self, staged: Sequence[_Staged]) -> Iterator[_Shard]:
        by_namespace: dict[int, list[_Staged]] = {}
        for item in staged:
            by_namespace.setdefault(item.job.namespace.id, []).append(item)
        for namespace_id, items in by_namespace.items():
            record = items[0].job.record
            position = 0
            for run in split_runs([item.block for item in items], self._limit.shard_bytes):
                buffers, placed, nbytes = encode_shard(record, run)
                members = items[position : position + len(run)]
                position += len(run)
                for member, block in zip(members, placed, strict=True):
                    member.block = block
                yield _Shard(namespace_id, record, members, buffers, nbytes)

    # -- files -------------------------------------------------------------------------------

    def _reserve(self, shard: _Shard, jobs: Sequence[PutJob]) -> list[_Placed]:
        """Reserve room for a shard, making it first. What finds none is dropped."""
        found = self._room.find(
            shard.namespace_id,
            shard.nbytes,
            shard.part_bytes,
            lambda connection: _ancestors(connection, jobs),
        )
        if isinstance(found, Reservation):
            return [_Placed(found, shard)]
        shard.drop(found)
        return []

    def _publish(self, placed: Sequence[_Placed]) -> list[_Placed]:
        """Write the files, several at a time: one is written while another is synced."""
        published: list[_Placed] = []
        for item, error in zip(placed, self._spreader.map(self._write, placed), strict=True):
            if error is None:
                published.append(item)
                continue
            log.warning("shard not written: %s", error.strerror)
            item.shard.drop(f"io_error: {error.strerror}")
            self._reservations.abandon([item.place])
        return published

    def _write(self, item: _Placed) -> OSError | None:
        try:
            self._reservations.publish(item.place, item.shard.buffers)
        except OSError as error:
            return error
        return None


def _run_task(connection: Connection, task: Task) -> None:
    """Run a small write; one that the index refuses is undone alone and said."""
    connection.execute("SAVEPOINT task")
    try:
        task(connection)
    except sqlite3.Error as error:
        connection.execute("ROLLBACK TO task")
        log.warning("a record was not written: %s", error)
    connection.execute("RELEASE task")


def _incoming(job: PutJob, payload: Payload) -> Incoming:
    return Incoming(
        job.namespace.id,
        job.namespace.layout,
        job.hashes[payload.index],
        job.hashes[payload.index - 1] if payload.index else ROOT_PARENT,
        payload.index,
        job.origin,
        job.exact,
        job.build_id,
    )


def _ancestors(connection: Connection, jobs: Sequence[PutJob]) -> set[int]:
    """Ids of the deepest stored blocks under each job: what its new blocks will stand on."""
    ids: set[int] = set()
    for job in jobs:
        if job.payloads and job.payloads[0].index:
            row = index.find_block(connection, job.hashes[job.payloads[0].index - 1])
            if row is not None:
                ids.add(row.id)
        for payload in job.payloads:
            row = index.find_block(connection, job.hashes[payload.index])
            if row is not None:
                ids.add(row.id)
    return ids


class _Jobs:
    """Makes the blocks of some jobs visible, in one transaction."""

    def __init__(self, connection: Connection, now: int, placed: Sequence[_Placed]) -> None:
        self._connection = connection
        self._now = now
        self._visible = Visible(connection, now)
        self._thinned: list[int] = []
        self.counted: list[tuple[Ticket, bool]] = []
        self.computed: list[bytes] = []  # hashes of blocks that were not imported
        self._placed: dict[tuple[int, int], tuple[int, ShardBlock]] = {
            (id(member.job), member.payload.index): (place.id, member.block)
            for place, shard in placed
            for member in shard.staged
        }

    @property
    def emptied(self) -> list[int]:
        """Shards that lost parts."""
        return [*self._visible.emptied, *self._thinned]

    def insert(self, jobs: Sequence[PutJob]) -> None:
        for job in jobs:
            tip = self._insert_job(job)
            if tip is None:
                continue
            if job.advance_id is not None:
                holding.move_sequence(self._connection, job.advance_id, tip)
            layout, size = job.namespace.layout, job.namespace.block_tokens
            if thinning.due(layout, size, len(job.tokens)):
                self._thinned += thinning.thin(self._connection, layout, size, tip, self._now)

    def dropped(self, jobs: Sequence[PutJob], block_bytes: int) -> dict[str, int]:
        """How many blocks were not stored, by counter."""
        payloads = [payload for job in jobs for payload in job.payloads]
        large = sum(payload.nbytes > block_bytes for payload in payloads)
        rest = len(payloads) - len(self.counted) - large
        counts = {"blocks_too_large": large, "blocks_dropped": rest}
        return {counter: count for counter, count in counts.items() if count > 0}

    def _insert_job(self, job: PutJob) -> int | None:
        tip: int | None = None
        for payload in job.payloads:
            placed = self._placed.get((id(job), payload.index), (None, None))
            found = self._visible.insert(_incoming(job, payload), *placed)
            if found is None:
                job.ticket.drop("parent_missing")
                break
            tip, stored = found
            self.counted.append((job.ticket, stored))
            if stored and job.origin != "import":
                self.computed.append(job.hashes[payload.index])
        return tip
