"""Pull: what a remote has and the store lacks, in runs that become visible as they go.

The remote is not trusted: every object is checked against its key before it is taken, and a block
is taken only where its parent is in the store or just came. What was pulled stays when the rest
fails; asked for again, a pull goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from kvdb import index
from kvdb.driver import Connection
from kvdb.errors import IntegrityError, StoreMissing
from kvdb.members import Member
from kvdb.remotes.described import fetch_namespace
from kvdb.remotes.naming import (
    ROOT,
    namespace_key,
    optional_parts,
    parse_block_key,
    parse_namespace_key,
)
from kvdb.remotes.packing import unpack
from kvdb.remotes.probe import PROBE_KEY
from kvdb.remotes.remote import Remote, RemoteError
from kvdb.remotes.report import INTERRUPTED, PullReport
from kvdb.remotes.runs import Runs
from kvdb.remotes.sorting import Sized, SortedKeys
from kvdb.remotes.windows import WantedBlock, Window, fetch_windows
from kvdb.shards import NamespaceRecord
from kvdb.snapshot.admission import Admission
from kvdb.snapshot.known import compare_namespaces
from kvdb.snapshot.selection import is_model
from kvdb.snapshot.staging import NoRoom
from kvdb.snapshot.stream import Progress

if TYPE_CHECKING:
    from kvdb.store import Store

LOOK_BLOCKS = 256
HEX = frozenset("0123456789abcdef")


def pull_blocks(
    store: Store,
    remote: Remote,
    *,
    model: str | None = None,
    salted: bool = False,
    evict: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> PullReport:
    """See :meth:`kvdb.store.Store.pull`. Raises RemoteError where nothing came at all."""
    report = PullReport()
    run = _Pull(store, remote, report, model, salted, progress, stopped)
    try:
        with contextlib.closing(SortedKeys()) as keys:
            run.list(keys)
            if dry_run:
                run.count(keys)
            else:
                store.require_writable()
                run.take(keys, evict)
    except _Stop as stop:
        report.stopped = str(stop)
    except RemoteError as error:
        if not (report.stored or report.present):
            raise
        report.stopped, report.broken = str(error), True
    return report


class _Stop(Exception):
    """It is of no use to go on, or nobody wants it any more."""


class _Pull:
    def __init__(
        self,
        store: Store,
        remote: Remote,
        report: PullReport,
        model: str | None,
        salted: bool,
        progress: Progress | None,
        stopped: Callable[[], bool],
    ) -> None:
        self._store = store
        self._remote = remote
        self._report = report
        self._model = model
        self._salted = salted
        self._progress = progress
        self._stopped = stopped
        self._admission = Admission(store)
        # Objects that are dealt with, and all that are listed.
        self._done = self._total = 0

    # -- what there is -----------------------------------------------------------------------

    def list(self, keys: SortedKeys) -> None:
        """Collect the keys of blocks; whatever else lies there is counted."""
        model = (self._model or "").lower()
        narrow = len(model) >= 8 and set(model) <= HEX
        for number, listed in enumerate(self._remote.list(ROOT + model if narrow else ROOT)):
            key = parse_block_key(listed.key)
            if key is not None:
                keys.add(key, listed.nbytes)
            elif parse_namespace_key(listed.key) is None and listed.key != PROBE_KEY:
                self._report.foreign += 1
            if not number % 1000:
                self._go_on()
        self._total = keys.count

    def count(self, keys: SortedKeys) -> None:
        """Say what would be fetched."""
        report = self._report
        for _, blocks in self._wanted(keys):
            for block in blocks:
                report.stored += 1
                report.got += len(block.objects)
                report.nbytes += sum(sized.nbytes for sized in block.objects)

    def take(self, keys: SortedKeys, evict: bool) -> None:
        """Fetch, check, stage, publish."""
        full: NoRoom | None = None
        with contextlib.closing(
            Runs(self._store, self._admission, self._report, evict=evict)
        ) as runs:
            for record, blocks in self._wanted(keys):
                try:
                    for window in fetch_windows(self._remote, record, blocks):
                        self._take(record, window, runs)
                        self._done += sum(len(block.objects) for block in window.blocks)
                        self._go_on()
                        if window.error is not None:
                            raise window.error
                    runs.publish()
                except NoRoom as error:
                    full = error
                    runs.publish_staged()
                    if error.reason != "quota":
                        break
                    # Other namespaces may have room.
                    self._report.left["no_room"] += sum(1 for _ in blocks)
                except (_Stop, RemoteError):
                    runs.publish_staged()
                    raise
        if full is not None:
            raise _Stop(str(full) if evict else f"{full} With --evict others go for it.")

    def _wanted(self, keys: SortedKeys) -> Iterator[tuple[NamespaceRecord, Iterator[WantedBlock]]]:
        """Namespaces that may be had, each with its blocks of which the store lacks something."""
        known = self._model is None
        for fingerprint, sized in groupby(keys, lambda each: each.key.fingerprint):
            record = self._record(fingerprint)
            if record is None:
                continue
            if self._model is not None and not is_model(self._model, record.model, fingerprint):
                continue
            known = True
            if record.salt and not self._salted:
                self._report.salted += 1
                continue
            with self._store.database.read() as connection:
                self._report.namespaces += compare_namespaces(connection, [record])
            yield record, self._lacking(record, sized)
        if not known:
            raise StoreMissing(f"The remote holds nothing of the model {self._model!r}.")

    def _record(self, fingerprint: bytes) -> NamespaceRecord | None:
        """A namespace, if its description is there and good."""
        try:
            record = fetch_namespace(self._remote, fingerprint)
        except IntegrityError as error:
            self._report.reject(namespace_key(fingerprint), str(error))
            return None
        if record is None:
            self._report.left["undescribed"] += 1
        return record

    def _lacking(self, record: NamespaceRecord, keys: Iterable[Sized]) -> Iterator[WantedBlock]:
        report = self._report
        fits = self._admission.fits(record)
        parts = {None, *optional_parts(record.layout)}
        batch: list[WantedBlock] = []
        for (_, hash_), group in groupby(keys, lambda each: (each.key.depth, each.key.hash)):
            objects = list(group)
            ours = [sized for sized in objects if sized.key.part in parts]
            report.foreign += len(objects) - len(ours)
            report.blocks += bool(ours)
            if ours and fits:
                batch.append(WantedBlock(hash_, ours))
            else:
                report.left.update({"too_large": 1} if ours else {})
                self._done += len(objects)
            if len(batch) >= LOOK_BLOCKS:
                self._go_on()
                yield from self._compare(batch)
                batch = []
        yield from self._compare(batch)

    def _compare(self, blocks: Sequence[WantedBlock]) -> Iterator[WantedBlock]:
        with self._store.database.read() as connection:
            lacks = [_lacks(connection, block) for block in blocks]
        for block, objects in zip(blocks, lacks, strict=True):
            self._done += len(block.objects) - len(objects or ())
            if objects:
                self._report.new += 1
                yield WantedBlock(block.hash, objects)
            elif objects is not None:
                self._report.present += 1
            else:
                self._report.left["incomplete"] += 1

    def _go_on(self) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total)
        if self._stopped():
            raise _Stop(INTERRUPTED)

    # -- taking it ---------------------------------------------------------------------------

    def _take(self, record: NamespaceRecord, window: Window, runs: Runs) -> None:
        for block in window.blocks:
            members = self._checked(record, block, window)
            if not members:
                continue
            try:
                admitted = [self._admission.admit(member) for member in _joined(members)]
            except IntegrityError as error:
                self._report.reject(str(block.objects[0].key), str(error))
                continue
            if "parent_missing" in admitted:
                self._report.left["parent_missing"] += 1
            for each in admitted:
                if not isinstance(each, str):
                    runs.add(each)
            if all(each == "present" for each in admitted):
                self._report.new -= 1
                self._report.present += 1

    def _checked(
        self, record: NamespaceRecord, block: WantedBlock, window: Window
    ) -> Sequence[Member]:
        """The objects of a block that came and are what their keys say; none where the block's
        required parts are wanted and are not among them."""
        report = self._report
        members: list[Member] = []
        for key, _ in block.objects:
            data = window.data.get(key)
            try:
                if data is not None:
                    members.append(unpack(str(key), data, record))
                    report.got += 1
                    report.nbytes += data.nbytes
                elif key in window.problems:
                    why = window.problems[key]
                    if why is not None:
                        raise IntegrityError(why)
                    report.left["went"] += 1
            except IntegrityError as error:
                report.reject(str(key), str(error))
            if key.part is None and not members:
                break
        return members


def _lacks(connection: Connection, block: WantedBlock) -> Sequence[Sized] | None:
    """Which of a block's objects the store lacks; None for parts of a block that is nowhere."""
    row = index.find_block(connection, block.hash)
    if row is None or row.state != "live":
        return block.objects if block.objects[0].key.part is None else None
    have = {part for part, *_ in connection.execute(index.BLOCK_PARTS, (row.id,))}
    return [
        sized
        for sized in block.objects
        if sized.key.part is not None and sized.key.part not in have
    ]


def _joined(members: Sequence[Member]) -> list[Member]:
    """Objects of one block as one member, as far as the same build computed them."""
    first, *rest = members
    apart: list[Member] = []
    for member in rest:
        if (member.exact, member.build) == (first.exact, first.build):
            first = replace(first, parts=(*first.parts, *member.parts))
        else:
            apart.append(member)
    return [first, *apart]
