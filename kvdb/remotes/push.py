"""Push: chosen blocks to a remote, as far as it lacks them; namespaces first, then parents first.

Nothing is remembered of a push: one that was interrupted goes on when it is asked for again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvdb import index
from kvdb.errors import IntegrityError
from kvdb.members import read_member
from kvdb.remotes.described import fetch_namespace, namespace_object
from kvdb.remotes.naming import BlockKey, namespace_key
from kvdb.remotes.packing import keys_of, most_bytes, pack, unpack
from kvdb.remotes.remote import Get, Put, PutState, Remote, RemoteError
from kvdb.remotes.report import INTERRUPTED, PushReport
from kvdb.shards import NamespaceRecord
from kvdb.snapshot.arenas import Arenas
from kvdb.snapshot.export import held
from kvdb.snapshot.selection import Chosen, Plan, Selection, make_plan
from kvdb.snapshot.stream import Progress

if TYPE_CHECKING:
    from kvdb.store import Store

ASK_BLOCKS = 500
PUT_BYTES = 16 << 20
PUT_OBJECTS = 256
FULL = "The remote has no room for more."


class _Objects(NamedTuple):
    """The objects of a block: their keys, and how many bytes of parts each holds."""

    block: Chosen
    keys: list[BlockKey]
    nbytes: list[int]


def push_blocks(
    store: Store,
    remote: Remote,
    selection: Selection,
    *,
    verify: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> PushReport:
    """See :meth:`kvdb.store.Store.push`. Raises RemoteError where nothing could be done
    at all."""
    plan = make_plan(store, selection, tokens=True, recoded=None)
    report = PushReport(blocks=len(plan.blocks), salted=plan.salted)
    try:
        if dry_run:
            _Push(store, remote, plan, report, None, verify, progress).blocks(stopped)
            return report
        with held(store, plan), concurrent.futures.ThreadPoolExecutor(1, "kvdb-push") as executor:
            sender = _Sender(remote, report, executor)
            run = _Push(store, remote, plan, report, sender, verify, progress)
            try:
                run.namespaces()
                run.blocks(stopped)
                sender.finish()
            except (_Stop, RemoteError):
                sender.settle()
                raise
    except _Stop as stop:
        report.stopped = str(stop)
        report.broken = report.stopped != INTERRUPTED
    except RemoteError as error:
        if not (report.stored or report.present):
            raise
        report.stopped, report.broken = str(error), True
    if report.failed and not report.stopped:
        report.stopped = f"{report.failed} objects could not be stored there."
        report.broken = True
    return report


class _Stop(Exception):
    """It is of no use to go on, or nobody wants it any more."""


class _Sender:
    """Puts objects in batches, each while the next is read."""

    def __init__(
        self, remote: Remote, report: PushReport, executor: concurrent.futures.Executor
    ) -> None:
        self._remote = remote
        self._report = report
        self._executor = executor
        self._puts: list[Put] = []
        self._nbytes = 0
        self._sent: list[Put] = []
        self._sending: concurrent.futures.Future[list[PutState]] | None = None
        # A batch lies in one while the one before is sent out of the other.
        self.arenas = Arenas()
        self.arenas.reserve(PUT_BYTES)

    def add(self, put: Put) -> None:
        self._puts.append(put)
        self._nbytes += _size(put)

    def flush(self) -> None:
        """Send what was added, if it is enough for a batch. The arena's memory may be used again
        after the next flush."""
        if self._nbytes >= PUT_BYTES or len(self._puts) >= PUT_OBJECTS:
            self._send()

    def finish(self) -> None:
        self._send()
        self._wait()

    def settle(self) -> None:
        """Count what became of the batch that is under way, when it is given up."""
        with contextlib.suppress(_Stop, RemoteError):
            self._wait()

    def _send(self) -> None:
        self._wait()
        self._sent, self._puts, self._nbytes = self._puts, [], 0
        if self._sent:
            self._sending = self._executor.submit(self._remote.put_many, self._sent)
        self.arenas.swap()
        self.arenas.reserve(PUT_BYTES)

    def _wait(self) -> None:
        sending, self._sending = self._sending, None
        if sending is None:
            return
        states = sending.result()
        report = self._report
        for put, state in zip(self._sent, states, strict=True):
            if state == "stored":
                report.stored += 1
                report.nbytes += _size(put)
                report.replaced += put.replace
            elif state == "present":
                report.present += 1
            else:
                report.failed += 1
        if "full" in states:
            raise _Stop(FULL)
        if set(states) == {"failed"}:
            raise _Stop("The remote stores nothing now.")


class _Push:
    """One push; without a ``sender`` it is only counted what would go."""

    def __init__(
        self,
        store: Store,
        remote: Remote,
        plan: Plan,
        report: PushReport,
        sender: _Sender | None,
        verify: bool,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._remote = remote
        self._plan = plan
        self._report = report
        self._sender = sender
        self._verify = verify
        self._progress = progress
        self._gone: set[int] = set()

    def namespaces(self) -> None:
        """Describe the namespaces there; one that is described wrongly is described anew."""
        for record in self._plan.manifest.namespaces:
            key = namespace_key(record.fingerprint)
            bad = False
            try:
                if fetch_namespace(self._remote, record.fingerprint) is not None:
                    continue
            except IntegrityError as error:
                self._report.reject(key, str(error))
                bad = True
            put = Put(key, [memoryview(namespace_object(record))], bad)
            (state,) = self._remote.put_many([put])
            if state not in ("stored", "present"):
                raise _Stop(FULL if state == "full" else "The remote stores nothing now.")
            self._report.replaced += bad

    def blocks(self, stopped: Callable[[], bool]) -> None:
        done = 0
        blocks = self._plan.blocks
        for first in range(0, len(blocks), ASK_BLOCKS):
            asked = self._objects(blocks[first : first + ASK_BLOCKS])
            keys = [str(key) for objects in asked for key in objects.keys]
            there = dict(zip(keys, self._remote.exists_many(keys), strict=True))
            for objects in asked:
                if stopped():
                    raise _Stop(INTERRUPTED)
                self._block(objects, there)
                done += 1
                if self._progress is not None:
                    self._progress(done, len(blocks))

    def _objects(self, blocks: Sequence[Chosen]) -> list[_Objects]:
        with self._store.database.read() as connection:
            places = index.locations(connection, [block.id for block in blocks])
        sizes: dict[int, dict[str, int]] = {}
        for (id_, part), place in places.items():
            sizes.setdefault(id_, {})[part] = place.nbytes
        found = []
        for block in blocks:
            record = self._record(block)
            own = sizes.get(block.id, {})
            keys = keys_of(block.hash, block.depth, sorted(own), record)
            rest = [own[key.part] for key in keys[1:] if key.part is not None]
            found.append(_Objects(block, keys, [sum(own.values()) - sum(rest), *rest]))
        return found

    def _block(self, objects: _Objects, there: dict[str, bool]) -> None:
        """Put what is not there of a block, or is there and bad."""
        block = objects.block
        if block.parent_id in self._gone:
            self._leave(block)  # of no use without its parent
            return
        present = [key for key in objects.keys if there[str(key)]]
        bad = self._bad(present, self._record(block)) if self._verify else set()
        self._report.present += len(present) - len(bad)
        lacking = {str(key) for key in objects.keys} - {str(key) for key in present} | bad
        if not lacking:
            return
        if self._sender is None:
            self._report.stored += len(lacking)
            sizes = zip(objects.keys, objects.nbytes, strict=True)
            self._report.nbytes += sum(nbytes for key, nbytes in sizes if str(key) in lacking)
            return
        self._sender.flush()
        take = self._sender.arenas.take
        member = read_member(self._store, self._record(block), block.id, take)
        if member is None or member.hash != block.hash:
            self._leave(block)
            return
        if member.tokens is None:
            self._gone.add(block.id)
            self._report.withheld += 1
            return
        for key, buffers in pack(member):
            if str(key) in lacking:
                self._sender.add(Put(str(key), buffers, str(key) in bad))

    def _leave(self, block: Chosen) -> None:
        self._gone.add(block.id)
        self._report.went += 1

    def _bad(self, keys: Sequence[BlockKey], record: NamespaceRecord) -> set[str]:
        """Which of these objects, that are there, are not what they should be."""
        bad: set[str] = set()
        rooms = [most_bytes(record.layout, key.part, record.block_tokens) for key in keys]
        buffers = [np.empty(room, np.uint8).data for room in rooms]
        names = [str(key) for key in keys]
        for got in self._remote.get_many(list(map(Get, names, buffers))):
            name = names[got.index]
            try:
                if got.nbytes is None:
                    raise IntegrityError(got.problem or "It is not there.")
                unpack(name, buffers[got.index][: got.nbytes], record)
            except IntegrityError as error:
                bad.add(name)
                self._report.reject(name, str(error))
        return bad

    def _record(self, block: Chosen) -> NamespaceRecord:
        return self._plan.manifest.namespaces[block.namespace]


def _size(put: Put) -> int:
    return sum(buffer.nbytes for buffer in put.buffers)
