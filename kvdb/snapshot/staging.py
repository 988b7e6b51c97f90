"""Staging: blocks of a snapshot, or of a remote, on their way into the store.

Blocks are written into shards whose rows say ``writing`` and whose files keep their temporary
names: nobody sees them, they count in the limit, and whoever opens the store after a crash sweeps
them. Only when they are published do they become visible, in short transactions.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvdb import index
from kvdb.builds import find_or_add_build
from kvdb.driver import Connection
from kvdb.errors import KvdbError, OutOfSpace, disk_error
from kvdb.members import Member
from kvdb.reservation import Reservation
from kvdb.shards import (
    HEADER_BYTES_PER_BLOCK,
    HEADER_BYTES_PER_PART,
    MAX_HEADER_BYTES,
    Bytes,
    NamespaceRecord,
    ShardContent,
    encode_shard,
    read_shard_content,
    shard_path,
)
from kvdb.snapshot.arenas import Arenas
from kvdb.visible import Incoming, Visible

if TYPE_CHECKING:
    from kvdb.store import Store

# While one run is synced the next is read: two of them are in memory.
RUN_BYTES = 24 << 20
# Few enough that their rows are inserted well within 100 ms.
RUN_BLOCKS = 192
RUN_HEADER_BYTES = MAX_HEADER_BYTES // 2
EMPTY_NAMESPACE = (
    "DELETE FROM namespaces WHERE id = ?1 AND NOT EXISTS "
    "(SELECT 1 FROM shards WHERE namespace_id = ?1) AND NOT EXISTS "
    "(SELECT 1 FROM blocks WHERE namespace_id = ?1) AND NOT EXISTS "
    "(SELECT 1 FROM sequences WHERE namespace_id = ?1) AND NOT EXISTS "
    "(SELECT 1 FROM requests WHERE namespace_id = ?1) AND NOT EXISTS "
    "(SELECT 1 FROM builds WHERE namespace_id = ?1)"
)
WHY_NO_ROOM = {
    "disk_full": "the disk has too little free space",
    "quota": "its namespace's or tenant's quota is too small",
    "limit": "max_bytes is too small",
}


class NoRoom(OutOfSpace):
    """What comes does not fit beside what is stored: for want of disk space, for a ``quota`` or
    for the ``limit``."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"There is no room for it in the store: {WHY_NO_ROOM[reason]}.")
        self.reason = reason


class _Staged(NamedTuple):
    """A shard with its file under its temporary name. It describes itself, so that nothing else of
    it need be remembered."""

    place: Reservation
    namespace_id: int


class Staging:
    """One import's shards. ``evict`` allows that stored blocks go to make room; ``anchors`` are
    hashes of stored blocks that must not: staged ones stand on them."""

    def __init__(self, store: Store, *, evict: bool) -> None:
        self._store = store
        self._room = store.require_room()
        self._evict = evict
        self._most = min(RUN_BYTES, self._room.shard_bytes)
        self._run: list[Member] = []
        self._run_header = 0
        self._run_bytes = 0
        self._arenas = Arenas()
        self._given = 0
        self._staged: list[_Staged] = []
        self._namespaces: dict[bytes, int] = {}
        self._made: list[int] = []
        self._part_bytes: dict[int, int] = {}
        self._syncing: concurrent.futures.Future[None] | None = None
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "kvdb-import")
        self.anchors: set[bytes] = set()

    def allocate(self, record: NamespaceRecord, nbytes: int) -> Bytes:
        """Memory for the next member of ``record``'s namespace; given again unless :meth:`add`
        keeps it. Raises NoRoom, or OutOfSpace and the like when blocks taken before cannot be
        written."""
        self._close_run(record, self._arenas.used + nbytes)
        self._arenas.reserve(RUN_BYTES)
        self._given = nbytes
        return self._arenas.room(nbytes)

    def add(self, member: Member) -> None:
        """Take the block that lies in the memory allocated last."""
        self._append(member)
        self._arenas.keep(self._given)

    def take(self, member: Member) -> None:
        """Take a block in memory of its own, which nobody changes any more. Raises what
        :meth:`allocate` raises; then it is not taken. One staging has either blocks of its own
        memory, or these."""
        self._close_run(member.record, self._run_bytes + member.payload_bytes)
        self._append(member)

    def finish(self) -> None:
        """Make everything durable that was added; it is still invisible. Raises what
        :meth:`allocate` raises."""
        self._flush()
        self._wait()

    def publish(
        self,
        builds: Mapping[tuple[bytes, str], str],
        first: Callable[[Connection], None],
        count: Callable[[int, int, int], None],
    ) -> None:
        """Make all blocks visible, a shard at a time, parents first; then more can be added.

        ``builds`` are descriptions by namespace fingerprint and digest; ``first`` is run in the
        first transaction; ``count`` is told how many blocks of each shard were stored, how many
        are there by now, and how many could not stand any more."""
        while self._staged:
            staged = self._staged[0]
            content = self._settle(staged)
            with self._store.database.write() as connection:
                first(connection)
                stored, dropped, dead = self._insert(connection, staged, content, builds)
            first = _nothing
            del self._staged[0]
            count(stored, len(content.blocks) - stored - dropped, dropped)
            if dead:
                self._store.require_retention().sweep_dead()
        # What is published counts in quotas by itself, and stands on its own.
        self._part_bytes.clear()
        self.anchors.clear()
        self._store.reader.sweep()

    def close(self) -> None:
        """Remove what was not published, and namespaces that were made for it."""
        with contextlib.suppress(KvdbError):  # the reason that goes on is the first one
            self._wait()
        self._executor.shutdown()
        self._room.reservations.abandon(staged.place for staged in self._staged)
        self._staged.clear()
        if self._made:
            # An empty namespace that stays is in nobody's way.
            with contextlib.suppress(KvdbError), self._store.database.write() as connection:
                connection.executemany(EMPTY_NAMESPACE, [(id_,) for id_ in self._made])

    # -- writing -----------------------------------------------------------------------------

    def _close_run(self, record: NamespaceRecord, nbytes: int) -> None:
        """Write the run out if a block of ``record`` does not go into it, with which it would have
        ``nbytes``."""
        if self._run and (
            self._run[0].record is not record
            or len(self._run) >= RUN_BLOCKS
            or self._run_header > RUN_HEADER_BYTES
            or nbytes > self._most
        ):
            self._flush()

    def _append(self, member: Member) -> None:
        self._run.append(member)
        self._run_header += _header_bytes(member)
        self._run_bytes += member.payload_bytes

    def _flush(self) -> None:
        if not self._run:
            return
        run, self._run = self._run, []
        self._run_header = self._run_bytes = 0
        record = run[0].record
        buffers, _, nbytes = encode_shard(record, [member.block() for member in run])
        namespace_id = self._namespace(record)
        part_bytes = sum(member.payload_bytes for member in run)
        self._part_bytes[namespace_id] = self._part_bytes.get(namespace_id, 0) + part_bytes
        found = self._room.find(
            namespace_id,
            nbytes,
            self._part_bytes[namespace_id],
            self._protected,
            evict=self._evict,
        )
        if not isinstance(found, Reservation):
            raise NoRoom(found)
        self._staged.append(_Staged(found, namespace_id))
        self._wait()
        self._syncing = self._executor.submit(self._room.reservations.stage, found, buffers)
        self._arenas.swap()

    def _wait(self) -> None:
        future, self._syncing = self._syncing, None
        if future is not None:
            try:
                future.result()
            except OSError as error:
                raise disk_error(self._store.path, error) from error

    def _namespace(self, record: NamespaceRecord) -> int:
        """A shard's row names its namespace, so that must be there; with nothing in it, it is
        removed again when the import fails."""
        if record.fingerprint not in self._namespaces:
            with self._store.database.write() as connection:
                id_, made = index.find_or_add_namespace(
                    connection, record, self._store.environment.now_us()
                )
            self._namespaces[record.fingerprint] = id_
            if made:
                self._made.append(id_)
        return self._namespaces[record.fingerprint]

    def _protected(self, connection: Connection) -> set[int]:
        rows = (index.find_block(connection, hash_) for hash_ in self.anchors)
        return {row.id for row in rows if row is not None}

    # -- publishing --------------------------------------------------------------------------

    def _settle(self, staged: _Staged) -> ShardContent:
        try:
            self._room.reservations.settle(staged.place)
            return read_shard_content(shard_path(self._store.path, staged.place.uuid))
        except OSError as error:
            raise disk_error(self._store.path, error) from error

    def _insert(
        self,
        connection: Connection,
        staged: _Staged,
        content: ShardContent,
        builds: Mapping[tuple[bytes, str], str],
    ) -> tuple[int, int, list[tuple[int, str, int]]]:
        """(blocks of which something was stored, blocks that could not stand, dead shards)."""
        now = self._store.environment.now_us()
        part_bytes = sum(part.nbytes for block in content.blocks for part in block.parts)
        connection.execute(index.PUBLISH_SHARD, (content.nbytes, part_bytes, staged.place.id))
        visible = Visible(connection, now)
        record = content.namespace
        ids: dict[str | None, int | None] = {None: None}
        stored = dropped = 0
        for block in content.blocks:
            if block.build is not None and block.build not in ids:
                description = builds.get((record.fingerprint, block.build), "{}")
                ids[block.build] = find_or_add_build(
                    connection, staged.namespace_id, block.build, description, now
                ).id
            found = visible.insert(
                Incoming(
                    staged.namespace_id,
                    record.layout,
                    block.hash,
                    block.parent,
                    block.depth,
                    block.origin,
                    block.exact,
                    ids[block.build],
                ),
                staged.place.id,
                block,
            )
            stored += found is not None and found[1]
            dropped += found is None
        dead = index.kill_if_empty(connection, [*visible.emptied, staged.place.id])
        return stored, dropped, dead


def _header_bytes(member: Member) -> int:
    extra = sum(2 * len(key) for key in member.extra or ())
    return HEADER_BYTES_PER_BLOCK + HEADER_BYTES_PER_PART * len(member.parts) + extra


def _nothing(_: Connection) -> None:
    pass
