"""Import: check every byte of a snapshot, stage what is new, then make it visible.

Nothing is unpacked by name, unpickled, or opened as a database: blocks are parsed from memory
(kvdb/members.py) and written into shards of this store's own.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from kvdb.driver import Connection
from kvdb.errors import (
    IntegrityError,
    OutOfSpace,
    QuotaExceeded,
    SnapshotRejected,
    StoreMissing,
    UsageError,
)
from kvdb.identity import canonical_json
from kvdb.members import Member, parse_member
from kvdb.shards import HEADER_CAP_BYTES, Bytes, NamespaceRecord
from kvdb.snapshot.admission import Admission, block_bytes
from kvdb.snapshot.arenas import Arenas
from kvdb.snapshot.known import NamespaceNote, compare_namespaces
from kvdb.snapshot.manifest import MAX_BYTES as MANIFEST_BYTES
from kvdb.snapshot.manifest import Manifest, NamedTip
from kvdb.snapshot.provenance import insert_import, update_import
from kvdb.snapshot.staging import NoRoom, Staging
from kvdb.snapshot.stream import (
    BLOCK_NAME,
    MANIFEST,
    SUMS,
    Digests,
    Entry,
    Progress,
    Readable,
    TarReader,
)

if TYPE_CHECKING:
    from kvdb.store import Store

MAX_NAMESPACE_BYTES = 256 << 10

Opener = Callable[[], AbstractContextManager[Readable]]


@dataclass(slots=True)
class ImportReport:
    """What a snapshot holds and what came of it.

    ``blocks`` = ``new`` + ``present`` + those of ``incompatible``, by reason: ``parent_missing``
    (the snapshot leaves out what it stands on, and the store has not got it), ``too_large`` (for
    this store). ``stored`` of the new ones are in the store now. ``digest`` is that of the export's
    report. ``sequences`` were made, ``sequences_left`` were not: (name, why).
    """

    blocks: int = 0
    new: int = 0
    present: int = 0
    incompatible: Counter[str] = field(default_factory=Counter)
    stored: int = 0
    nbytes: int = 0
    namespaces: list[NamespaceNote] = field(default_factory=list)
    sequences: list[str] = field(default_factory=list)
    sequences_left: list[tuple[str, str]] = field(default_factory=list)
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Terms:
    """What of a snapshot may be taken, for one that came from a tenant: only state of the
    namespaces with these ``fingerprints``, and one named sequence, which becomes ``name`` of
    ``tenant`` whatever it is called."""

    fingerprints: frozenset[bytes]
    name: str
    tenant: str

    def check(self, manifest: Manifest) -> None:
        """Raise SnapshotRejected, before anything of the snapshot is stored."""
        if any(record.fingerprint not in self.fingerprints for record in manifest.namespaces):
            raise SnapshotRejected(
                "The snapshot holds state of another model, or of a key space that is not yours."
            )
        if len(manifest.sequences) != 1:
            raise SnapshotRejected("The snapshot must hold the state of one named sequence.")


def import_snapshot(
    store: Store,
    opener: Opener,
    *,
    name: str,
    again: bool,
    dry_run: bool = False,
    trust: bool = False,
    terms: Terms | None = None,
    total_bytes: int = 0,
    progress: Progress | None = None,
) -> ImportReport:
    """See :meth:`kvdb.store.Store.import_snapshot`. ``opener`` gives the stream from its start;
    with ``again`` it can do so more than once. ``name`` is kept as where the blocks came from."""
    run = _Import(store, opener, name, trust, terms, total_bytes, progress)
    if dry_run:
        return run.look()
    store.require_writable()
    try:
        return run.store_it(evict=False)
    except NoRoom as error:
        # Nothing that is stored goes for bytes that may yet turn out to be worthless.
        if not again:
            raise OutOfSpace(
                f"{error} From a pipe nothing is evicted to make room, as it cannot be verified "
                "first; import a file, or raise max_bytes."
            ) from error
    digest = run.look().digest
    return run.store_it(evict=True, expected=digest)


class _Import:
    def __init__(
        self,
        store: Store,
        opener: Opener,
        name: str,
        trust: bool,
        terms: Terms | None,
        total_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._opener = opener
        self._name = name
        self._trust = trust
        self._terms = terms
        self._total = total_bytes
        self._progress = progress

    def look(self) -> ImportReport:
        """Verify all of it and say what it holds; nothing is written."""
        with self._opener() as source:
            return self._pass(source, None)[1]

    def store_it(self, *, evict: bool, expected: str | None = None) -> ImportReport:
        """Stage, verify, publish."""
        started = self._store.environment.now_us()
        staging = Staging(self._store, evict=evict)
        with contextlib.closing(staging):
            with self._opener() as source:
                manifest, report = self._pass(source, staging)
            if expected is not None and report.digest != expected:
                raise SnapshotRejected("The snapshot changed while it was read.")
            staging.finish()
            self._publish(staging, manifest, report, started)
        self._name_tips(manifest, report)
        return report

    def _pass(self, source: Readable, staging: Staging | None) -> tuple[Manifest, ImportReport]:
        check = None if self._terms is None else self._terms.check
        run = _Pass(self._store, source, self._trust, check, staging, self._report_progress)
        with contextlib.closing(run):
            return run.run()

    def _report_progress(self, done: int) -> None:
        if self._progress is not None:
            self._progress(done, self._total)

    def _publish(
        self, staging: Staging, manifest: Manifest, report: ImportReport, started: int
    ) -> None:
        snapshot_id: list[int] = []

        def first(connection: Connection) -> None:
            snapshot_id.append(
                insert_import(
                    connection, self._name, report.digest, report.blocks, report.nbytes, started
                )
            )

        def count(stored: int, present: int, dropped: int) -> None:
            report.stored += stored
            report.new -= present  # somebody else stored them meanwhile
            report.present += present
            if dropped:
                report.incompatible["parent_missing"] += dropped
                report.new -= dropped

        builds = {
            (manifest.namespaces[build.namespace].fingerprint, build.digest): build.description
            for build in manifest.builds
        }
        staging.publish(builds, first, count)
        if snapshot_id:
            with self._store.database.write() as connection:
                update_import(
                    connection, snapshot_id[0], report.stored, self._store.environment.now_us()
                )

    def _name_tips(self, manifest: Manifest, report: ImportReport) -> None:
        """Make the named sequences whose tips are here now and whose names are free."""
        spaces = {space.fingerprint: space for space in self._store.namespaces()}
        tenant = "" if self._terms is None else self._terms.tenant
        for sequence in manifest.sequences:
            if self._terms is not None:
                sequence = replace(sequence, name=self._terms.name)
            space = spaces.get(manifest.namespaces[sequence.namespace].fingerprint)
            try:
                if space is None:
                    raise StoreMissing("Its state was not imported.")
                if self._has(sequence):
                    continue
                self._store.sequence(
                    space,
                    sequence.tip,
                    name=sequence.name,
                    ttl_seconds=self._ttl(sequence),
                    tenant=tenant,
                )
            except (StoreMissing, UsageError, QuotaExceeded) as error:
                report.sequences_left.append((sequence.name, str(error)))
            else:
                report.sequences.append(sequence.name)

    def _has(self, sequence: NamedTip) -> bool:
        """True when the name holds that very block already."""
        try:
            return self._store.find_sequence(sequence.name).tip_hash == sequence.tip
        except StoreMissing:
            return False

    def _ttl(self, sequence: NamedTip) -> float | None:
        if sequence.expires_at is None:
            return None
        left = (sequence.expires_at - self._store.environment.now_us()) / 1_000_000
        if left <= 0:
            raise UsageError("Its time is over.")
        return left


class _Pass:
    """One reading of a snapshot from its start to its end."""

    def __init__(
        self,
        store: Store,
        source: Readable,
        trust: bool,
        check: Callable[[Manifest], None] | None,
        staging: Staging | None,
        progress: Callable[[int], None],
    ) -> None:
        self._store = store
        self._reader = TarReader(source)
        self._trust = trust
        self._check = check
        self._staging = staging
        self._progress = progress
        self._sums = hashlib.sha256()
        self._digests = Digests(self._sums.update)
        self._is_kept = True
        self._arenas = Arenas()
        self._seen: set[bytes] = set()
        self._admission = Admission(store)
        self.report = ImportReport()

    def close(self) -> None:
        self._digests.close()

    def run(self) -> tuple[Manifest, ImportReport]:
        """Raises SnapshotRejected where anything is not as an export writes it."""
        manifest = self._manifest()
        if self._check is not None:
            self._check(manifest)
        if not manifest.tokens and not self._trust:
            raise SnapshotRejected(
                "The snapshot has no tokens, so nothing proves which prompts its state belongs to; "
                "--trust imports it if you trust whoever made it."
            )
        for record in manifest.namespaces:
            if len(canonical_json(record.to_document())) > MAX_NAMESPACE_BYTES:
                raise SnapshotRejected("The snapshot has a layout too large for a shard's header.")
        with self._store.database.read() as connection:
            self.report.namespaces = compare_namespaces(connection, manifest.namespaces)
        while True:
            member = self._next()
            if member.name == SUMS:
                self._check_sums(member)
                return manifest, self.report
            self._block(manifest, member)
            self._progress(self._reader.position)

    def _next(self) -> Entry:
        member = self._reader.next()
        if member is None:
            raise SnapshotRejected("The snapshot ends without its list of digests.")
        return member

    def _manifest(self) -> Manifest:
        member = self._next()
        if member.name != MANIFEST:
            raise SnapshotRejected(
                "This is not a kvdb snapshot: it does not begin with a manifest."
            )
        data = self._reader.read(member, MANIFEST_BYTES)
        self._digests.add(MANIFEST, [data])
        return Manifest.parse(bytes(data))

    def _check_sums(self, member: Entry) -> None:
        digest = self._reader.skip(member)
        self._digests.wait()
        if digest != self._sums.digest():
            raise SnapshotRejected("The snapshot's list of digests does not fit its members.")
        if self._reader.next() is not None:
            raise SnapshotRejected("The snapshot goes on behind its list of digests.")
        self.report.digest = digest.hex()

    def _block(self, manifest: Manifest, entry: Entry) -> None:
        found = BLOCK_NAME.fullmatch(entry.name)
        number = int(found[1]) if found is not None else 0
        if found is None or number >= len(manifest.namespaces):
            raise SnapshotRejected("The snapshot has a member of a name that kvdb does not give.")
        hash_ = bytes.fromhex(found[2])
        if hash_ in self._seen:
            raise SnapshotRejected("The snapshot has a block twice.")
        self._seen.add(hash_)
        self.report.blocks += 1
        record = manifest.namespaces[number]
        if entry.nbytes > block_bytes(record) + 2 * HEADER_CAP_BYTES:
            raise SnapshotRejected("The snapshot has a block larger than its layout.")
        if not self._admission.fits(record):
            self._digests.known(entry.name, self._reader.skip(entry))
            self.report.incompatible["too_large"] += 1
            return
        data = self._reader.read(entry, entry.nbytes, partial(self._allocate, record))
        self._digests.add(entry.name, [data])
        self._is_kept = False
        try:
            member = parse_member(data, record)
        except IntegrityError as error:
            raise SnapshotRejected(f"The snapshot has a bad block: {error}") from error
        if member.hash != hash_ or not member.is_whole:
            raise SnapshotRejected("The snapshot has a block under another's name, or half of one.")
        if manifest.tokens and member.tokens is None:
            raise SnapshotRejected("The snapshot's manifest is wrong about its tokens.")
        self._take(member)

    def _allocate(self, record: NamespaceRecord, nbytes: int) -> Bytes:
        if self._staging is not None:
            if not self._is_kept:
                self._digests.wait()  # the same memory is given again
            return self._staging.allocate(record, nbytes)
        self._arenas.swap()
        return self._arenas.room(nbytes)

    def _take(self, member: Member) -> None:
        """Decide what becomes of a good block."""
        try:
            admitted = self._admission.admit(member)
        except IntegrityError as error:
            raise SnapshotRejected(f"The snapshot has a bad block: {error}") from error
        if admitted == "parent_missing":
            self.report.incompatible["parent_missing"] += 1
        elif admitted == "present":
            self.report.present += 1
        else:
            self.report.new += 1
            self.report.nbytes += admitted.member.payload_bytes
            if self._staging is not None:
                if admitted.stands_on_stored:
                    self._staging.anchors.add(admitted.member.parent)
                self._staging.add(admitted.member)
                self._is_kept = True
