"""Store: the facade that ties index, shards, writer and retention together."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from kvdb import holding, index, recovery, retention
from kvdb.answers import Answer, find_answers, remember_answer
from kvdb.backup import MAX_AGE_SECONDS, refresh_backup
from kvdb.check.verify import VerifyReport, verify_store
from kvdb.clock import Environment
from kvdb.compaction import Compactor
from kvdb.damage import DamageDesk, read_or_report
from kvdb.driver import Database
from kvdb.durable import FileSystem
from kvdb.errors import (
    KvdbError,
    OutOfSpace,
    StoreClosed,
    StoreLocked,
    StoreReadOnly,
    StoreUnavailable,
    UsageError,
)
from kvdb.history import RequestRecord, insert_request
from kvdb.identity import (
    ExtraKey,
    Tokens,
    as_tokens,
    chain_hashes,
)
from kvdb.info import StoreInfo, collect_info
from kvdb.limit import Limit
from kvdb.locks import FileLock, WriterLock
from kvdb.match import Match, MatchedBlock, Namespace, PartRef, Trust, find_match
from kvdb.namespaces import Namespaces
from kvdb.ramtier import RamTier
from kvdb.reader import Bytes, Damaged, Location, PartBuffers, ShardReader
from kvdb.remotes.verbs import Sharing
from kvdb.restore import Fetch, ReadResult, Want, preload_match, read_cached, read_match, read_wants
from kvdb.retention import Retention
from kvdb.room import Room
from kvdb.segments import Segment
from kvdb.sequences import Lease, Sequence, create_sequence, find_sequence
from kvdb.shards import ORIGINS, NamespaceRecord
from kvdb.snapshot.verbs import Snapshots
from kvdb.spread import R, Spreader, T
from kvdb.upkeep import Upkeep
from kvdb.writer import Payload, PutJob, Ticket, Writer, check_payloads, fitting

if TYPE_CHECKING:
    from kvdb.remotes.tier import Tier

log = logging.getLogger("kvdb.store")

TokenIds = Items[int] | npt.NDArray[np.integer]


class Store(Namespaces, Upkeep, Snapshots, Sharing):
    """An open store. Make one with :func:`kvdb.open`; safe to use from several threads.

    Everything it returns is a value; what is stored changes only through it. A store opened for
    reading has no writer: writing verbs raise StoreReadOnly.
    """

    def __init__(
        self,
        path: Path,
        database: Database,
        limit: Limit,
        reader: ShardReader,
        fs: FileSystem,
        environment: Environment,
        *,
        locks: tuple[FileLock | WriterLock, ...],
        durability: str,
        damage: DamageDesk,
        spreader: Spreader,
        ram: RamTier[Bytes],
        read_ahead: int,
        retention: Retention | None = None,
        compactor: Compactor | None = None,
        room: Room | None = None,
        writer: Writer | None = None,
        process_id: int | None = None,
        process_lock: FileLock | None = None,
    ) -> None:
        self.path = path
        self.database = database
        self.limit = limit
        self.durability = durability
        self.environment = environment
        self.fs = fs
        self.reader = reader
        self.ram = ram
        # For engines: state that stays on a device whose memory the host does not share.
        self.device_ram: RamTier[Any] = RamTier()
        self.read_ahead = read_ahead
        self.remotes: Tier | None = None  # see Options.remotes
        self._retention = retention
        self._compactor = compactor
        self._room = room
        self._damage = damage
        self._writer = writer
        self._process_id = process_id
        self._process_lock = process_lock
        self._locks = locks
        self._spreader = spreader
        self._records: dict[int, NamespaceRecord] = {}
        self._handles: WeakValueDictionary[tuple[int, str], Namespace] = WeakValueDictionary()
        self._builds: dict[int, str] = {}
        self._closed = False
        self._pid = os.getpid()
        self._closing = threading.Lock()

    # -- life --------------------------------------------------------------------------------

    @property
    def read_only(self) -> bool:
        return self._writer is None

    def close(self) -> None:
        """Make everything queued durable, release what this process holds, close. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        try:
            if self._writer is not None:
                self._writer.close()
            if self.remotes is not None:
                self.remotes.close()
            if self._writer is not None:
                self._refresh_backup()
            if self._process_id is not None and self._process_lock is not None:
                recovery.deregister(self.database, self._process_lock, self._process_id)
        except (OSError, KvdbError) as error:
            log.warning("the next opener releases what this process held: %s", error)
        finally:
            self._release()

    def _refresh_backup(self) -> None:
        # Losing the backup is no reason to fail a shutdown.
        with contextlib.suppress(OSError, KvdbError):
            refresh_backup(
                self.database, self.limit, self.fs, self.environment, age=MAX_AGE_SECONDS
            )

    def _release(self) -> None:
        self._spreader.close()
        self.ram.clear()
        self.device_ram.clear()
        self.reader.close()
        self.database.close()
        for lock in reversed(self._locks):
            lock.close() if isinstance(lock, WriterLock) else lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all puts and records made before are durable; False on time-out."""
        return True if self._writer is None else self._writer.flush(timeout)

    def unwritten(self) -> tuple[int, int]:
        """Puts that are not durable yet, and their bytes."""
        return (0, 0) if self._writer is None else self._writer.waiting()

    def _require_writer(self) -> Writer:
        if self._closed or self._pid != os.getpid():
            raise StoreClosed("This store object is closed, or belongs to another process.")
        if self._writer is None:
            raise StoreReadOnly(f"The store at {self.path} is open for reading only.")
        return self._writer

    def require_writable(self) -> None:
        self._require_writer()

    # -- namespaces and builds ---------------------------------------------------------------

    # -- look up and read --------------------------------------------------------------------

    def match(
        self,
        namespace: Namespace,
        tokens: TokenIds,
        *,
        extra_keys: Items[ExtraKey] = (),
        exact_build: int | None = None,
        share_tail: bool = True,
    ) -> Match:
        """What of ``tokens`` is stored. With ``exact_build`` only exact blocks of that build are
        usable, and no tail is shared."""
        with self.database.read() as connection:
            return find_match(
                connection,
                namespace,
                as_tokens(tokens),
                extra_keys,
                exact_build=exact_build,
                share_tail=share_tail,
            )

    def lease(
        self,
        namespace: Namespace,
        tokens: TokenIds,
        *,
        extra_keys: Items[ExtraKey] = (),
        exact_build: int | None = None,
        share_tail: bool = True,
        tenant: str = "",
        trust: Trust | None = None,
    ) -> Lease:
        """A match whose blocks are held by a running sequence of this process. On a read-only
        store nothing is held, and a block may vanish before it is read. With ``trust`` only
        blocks of builds are used that it trusts."""
        array = as_tokens(tokens)

        def find(connection: Any) -> Match:
            return find_match(
                connection,
                namespace,
                array,
                extra_keys,
                exact_build=exact_build,
                share_tail=share_tail,
                trust=trust,
            )

        if self._writer is not None:
            # When it cannot be written now, a match that nothing holds is still a match.
            with contextlib.suppress(StoreLocked, OutOfSpace, StoreUnavailable, StoreReadOnly):
                return self._hold(namespace, find, tenant)
        with self.database.read() as connection:
            return Lease(find(connection), None)

    def _hold(self, namespace: Namespace, find: Callable[[Any], Match], tenant: str) -> Lease:
        with self.database.write() as connection:
            if self._closed:
                raise StoreClosed("This store object is closed.")
            match = find(connection)
            tip = match.tip_id
            if match.shared is not None and match.shared.block.index == match.matched:
                tip = match.shared.block.id  # holds the matched blocks too: it stands on them
            sequence_id = holding.add_sequence(
                connection,
                name=None,
                namespace_id=namespace.id,
                tip_id=tip,
                process_id=self._process_id,
                tenant=tenant,
                expires_at=None,
                now=self.environment.now_us(),
            )
        return Lease(match, Sequence(self, namespace, sequence_id, None))

    def read(
        self,
        match: Match,
        into: Mapping[str, PartBuffers],
        *,
        blocks: Items[int] | None = None,
        shared: bool = True,
    ) -> ReadResult:
        """Read matched blocks' token-cut parts into given buffers, in one pass, verified.

        ``into`` maps part names to arrays ``[layer][tensor]`` of the layout's dtype and shape with
        a token axis of any sufficient length; a block lands at its own token positions. ``blocks``
        chooses block indices (default: all live ones). What cannot be read is in the result, and
        already dropped from the index.
        """
        return read_match(self, match, into, blocks, shared)

    def read_parts(
        self, match: Match, wants: Items[Want], fetch: Fetch | None = None
    ) -> ReadResult:
        """Read chosen parts of chosen blocks into given buffers, in one pass, verified: what a
        model needs that does not look at every token (see :class:`Want`). What only remotes have
        comes by ``fetch`` (see Tier.fetch); without one it is lost."""
        return read_wants(self, match, wants, fetch)

    def spread(self, function: Callable[[T], R], items: Items[T]) -> Iterable[R]:
        """Map ``function`` over ``items`` in the store's reader threads."""
        return self._spreader.map(function, items)

    def stream(self, function: Callable[[T], R], items: Items[T]) -> Iterator[R]:
        """Like :meth:`spread`, but not further ahead of the caller than ``read_ahead``."""
        return self._spreader.stream(function, items, self.read_ahead)

    def preload(self, match: Match) -> ReadResult:
        """Bring a match's parts into the RAM tier, verified; without one they are only verified.
        What cannot be read is in the result, and already dropped from the index."""
        return preload_match(self, match)

    def read_part(
        self, part: PartRef, block: MatchedBlock | None = None
    ) -> npt.NDArray[np.uint8] | None:
        """The raw bytes of one part, verified, not to be changed; None when it is gone or damaged,
        or not that of ``block`` as it was matched (see MatchedBlock.lies_at)."""

        def read(place: Location) -> Bytes | None:
            return read_cached(self, place) if block is None or block.lies_at(place) else None

        place = self.locate([part.block_id]).get((part.block_id, part.part))
        return read_or_report(self.report_damage, place, read)

    def locate(self, block_ids: Items[int]) -> dict[tuple[int, str], Location]:
        """Where the parts of some blocks lie now, by (block id, part name)."""
        with self.database.read() as connection:
            return index.locations(connection, block_ids)

    def report_damage(self, location: Location, damage: Damaged) -> Location | None:
        """See :meth:`kvdb.damage.DamageDesk.report`."""
        return self._damage.report(location, damage)

    # -- put ---------------------------------------------------------------------------------

    def put(
        self,
        namespace: Namespace,
        tokens: TokenIds,
        payloads: Items[Payload],
        *,
        extra_keys: Items[ExtraKey] = (),
        origin: str = "prefill",
        exact: bool = False,
        build_id: int | None = None,
        advance: Sequence | None = None,
        hashes: Items[bytes] | None = None,
    ) -> Ticket:
        """Store blocks of one chain, in the background. ``tokens`` is the whole prefix to the end
        of the last payload's block, ``hashes`` those of its blocks, where they are known. Raises
        UsageError for a payload that does not fit the layout; what cannot be stored is said by the
        ticket."""
        writer = self._require_writer()
        array = as_tokens(tokens)
        check_payloads(namespace, len(array), payloads)
        if origin not in ORIGINS:
            raise UsageError(f"origin must be one of {', '.join(ORIGINS)}, not {origin!r}.")
        if build_id is not None and build_id not in self._builds:
            raise UsageError("build_id must be the id of a build that this store object gave.")
        if hashes is None:
            hashes = chain_hashes(namespace.fingerprint, array, namespace.block_tokens, extra_keys)
        ticket = Ticket(len(payloads))
        job = PutJob(
            namespace,
            self._record(namespace),
            hashes,
            array,
            tuple(extra_keys),
            fitting(namespace.layout, payloads, self.limit.block_bytes),
            origin,
            exact,
            build_id,
            None if build_id is None else self._builds.get(build_id),
            None if advance is None else advance.id,
            ticket,
        )
        dropped = writer.submit(job)
        if dropped:
            writer.submit_task(lambda connection: index.bump(connection, "blocks_dropped", dropped))
        return ticket

    # -- sequences ---------------------------------------------------------------------------

    def sequence(
        self,
        namespace: Namespace,
        tip_hash: bytes | None,
        *,
        name: str | None = None,
        ttl_seconds: float | None = None,
        tenant: str = "",
    ) -> Sequence:
        """Hold a block. With a name the sequence lasts until it is dropped or its TTL ends;
        without, as long as this process. Raises StoreMissing when the block is not held now,
        UsageError when the name is taken, QuotaExceeded when named sequences would hold more
        than half of what their tenant may have."""
        self._require_writer()
        owner = self._process_id if name is None else None
        return create_sequence(self, namespace, tip_hash, name, ttl_seconds, tenant, owner)

    def find_sequence(self, name: str) -> Sequence:
        """The sequence with this name. Raises StoreMissing when there is none."""
        return find_sequence(self, name)

    # -- history and queries -----------------------------------------------------------------

    def record(
        self,
        record: RequestRecord,
        tickets: Items[Ticket] = (),
        segments: Callable[[], Items[Segment]] | None = None,
        answer: Answer | None = None,
    ) -> None:
        """Write one request's row, with the tokens of its ``answer``, and count a use of its
        blocks, in the background, after its puts: what one of their ``tickets`` says was dropped
        becomes ``unstored``. ``segments`` gives those of the record, there too: a long prompt has
        many."""
        parts: list[Segment] = list(record.segments)

        def prepare() -> None:
            if segments is not None:
                parts.extend(segments())

        def write(connection: Any) -> None:
            dropped = next((ticket.reason for ticket in tickets if ticket.reason), None)
            row = replace(record, segments=tuple(parts), unstored=record.unstored or dropped)
            insert_request(connection, row)
            if self.remotes is not None:
                self.remotes.count(connection)
            if answer is not None:
                remember_answer(connection, answer, self.environment.now_us())
            if record.touched:
                retention.touch(connection, record.touched, index.next_tick(connection))

        self._require_writer().submit_task(write, prepare)

    def later(self, write: Callable[[Any], None]) -> None:
        """Run a small write on the index in the background, with the writer's next commit: what
        may be lost, but must not wait for the disk."""
        self._require_writer().submit_task(write)

    def answers(self, keys: Items[bytes]) -> Mapping[bytes, list[Tokens]]:
        """The tokens of answers remembered under some keys, newest first."""
        with self.database.read() as connection:
            return find_answers(connection, keys)

    def info(self) -> StoreInfo:
        return collect_info(self)

    def verify(
        self,
        *,
        data: bool = False,
        repair: bool = False,
        sample: int | None = None,
        start: int = 0,
        report: VerifyReport | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> VerifyReport:
        """Check the index against itself and the shard files; with ``data`` every stored byte.

        A given ``report`` is filled as it goes, so that an interrupted run can be resumed: its
        ``next_shard`` is the ``start`` of the next one.
        """
        return verify_store(
            self,
            data=data,
            repair=repair,
            sample=sample,
            start=start,
            report=VerifyReport() if report is None else report,
            progress=progress,
        )
