"""The background writer: a queue bounded in bytes, group commits, tickets.

A put returns at once with a ticket. One thread takes what waits, lays it out in shards, reserves
their bytes in the index, publishes the files, and only then makes the blocks visible. Nothing here
raises at the caller: what cannot be stored is dropped, counted, and said by the ticket.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvdb.driver import Connection
from kvdb.errors import KvdbError, UsageError
from kvdb.identity import ExtraKey, Tokens
from kvdb.layout import Layout
from kvdb.match import Namespace
from kvdb.shards import Bytes, NamespaceRecord

log = logging.getLogger("kvdb.writer")

Task = Callable[[Connection], None]
SAY_AGAIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Payload:
    """The state of one block of a chain: raw bytes by part name (1-D uint8, owned by the writer
    from now on). Optional parts may come later for a block that is stored already."""

    index: int
    parts: Mapping[str, Bytes]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class PutResult:
    """``stored`` blocks were written, ``present`` were there already, ``dropped`` were not stored
    for ``reason``."""

    stored: int
    present: int
    dropped: int
    reason: str | None


class Ticket:
    """A put under way. ``wait`` returns when its blocks are durable and visible, or dropped."""

    def __init__(self, blocks: int) -> None:
        self._done = threading.Event()
        self._blocks = blocks
        self._stored = 0
        self._present = 0
        self._reason: str | None = None

    def wait(self, timeout: float | None = None) -> PutResult:
        """Raises TimeoutError after ``timeout`` seconds; never for what could not be stored."""
        if not self._done.wait(timeout):
            raise TimeoutError("The put is still under way.")
        dropped = self._blocks - self._stored - self._present
        return PutResult(self._stored, self._present, dropped, self._reason if dropped else None)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def reason(self) -> str | None:
        """Why blocks were dropped, as far as is known now."""
        return self._reason

    def count(self, *, stored: int = 0, present: int = 0) -> None:
        self._stored += stored
        self._present += present

    def drop(self, reason: str) -> None:
        """Note why blocks are dropped; the first reason stands."""
        self._reason = self._reason or reason

    def finish(self) -> None:
        self._done.set()


@dataclass(frozen=True, slots=True, eq=False)
class PutJob:
    """Some blocks of one chain, in order. ``hashes`` cover the chain to the last payload."""

    namespace: Namespace
    record: NamespaceRecord
    hashes: Sequence[bytes]
    tokens: Tokens
    extra_keys: Sequence[ExtraKey]
    payloads: Sequence[Payload]
    origin: str
    exact: bool
    build_id: int | None
    build_digest: str | None
    advance_id: int | None
    ticket: Ticket = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(payload.nbytes for payload in self.payloads)

    def block_tokens(self, index: int) -> Tokens:
        size = self.namespace.block_tokens
        return self.tokens[index * size : (index + 1) * size]


Commit = Callable[[Sequence[PutJob], Sequence[Task]], None]


class _Waiting(NamedTuple):
    """A small write, and how many jobs were queued before it."""

    after: int
    write: Task
    prepare: Callable[[], None] | None


class Writer:
    """The queue and its thread. ``commit`` stores a group (see :class:`kvdb.commit.Committer`)."""

    def __init__(
        self,
        commit: Commit,
        *,
        queue_bytes: int,
        group_bytes: int,
        seconds: Callable[[], float],
    ) -> None:
        self._seconds = seconds
        self._said = ("", 0.0)
        self._commit = commit
        self._queue_bytes = queue_bytes
        self._group_bytes = group_bytes
        self._jobs: deque[PutJob] = deque()
        self._tasks: deque[_Waiting] = deque()
        self._queued = self._taken = 0
        self._bytes = 0
        self._busy = False
        self._closing = False
        self._failed = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvdb-writer", daemon=True)
        self._thread.start()

    def submit(self, job: PutJob) -> int:
        """Queue a job. Returns how many of its payloads, from its end, found no room.

        A job that finds the queue empty is taken whatever its size.
        """
        with self._condition:
            if self._closing or self._failed:
                job.ticket.drop("closed")
                job.ticket.finish()
                return len(job.payloads)
            kept = 0
            room = self._queue_bytes - self._bytes
            for payload in job.payloads:
                if payload.nbytes > room and (kept or self._bytes):
                    break
                room -= payload.nbytes
                kept += 1
            dropped = len(job.payloads) - kept
            if dropped:
                # The rest of the chain goes, never a middle block.
                job.ticket.drop("queue_full")
                job = _cut(job, kept)
            if not job.payloads and job.advance_id is None:
                job.ticket.finish()
                return dropped
            self._jobs.append(job)
            self._queued += 1
            self._bytes += job.nbytes
            self._condition.notify_all()
            return dropped

    def submit_task(self, task: Task, prepare: Callable[[], None] | None = None) -> None:
        """Queue a small index write; it is committed with or after all jobs queued before it.
        ``prepare`` is run before, outside of the transaction."""
        with self._condition:
            if not self._closing and not self._failed:
                self._tasks.append(_Waiting(self._queued, task, prepare))
                self._condition.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was queued before is committed or dropped; False on time-out."""
        with self._condition:
            idle = self._condition.wait_for(
                lambda: self._failed or not (self._jobs or self._tasks or self._busy), timeout
            )
            return idle and not self._failed

    def waiting(self) -> tuple[int, int]:
        """Puts that are queued or being written, and their bytes."""
        with self._condition:
            return len(self._jobs) + self._busy, self._bytes

    def close(self) -> None:
        """Finish what is queued, then stop the thread."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        jobs: list[PutJob] = []
        try:
            while True:
                with self._condition:
                    self._busy = False
                    self._condition.notify_all()
                    self._condition.wait_for(lambda: self._jobs or self._tasks or self._closing)
                    jobs, tasks = self._take()
                    if not jobs and not tasks:
                        return
                    self._busy = True
                self._commit_safely(jobs, tasks)
                self._finish(jobs)
                jobs = []
        finally:
            # Also after a bug: no caller may wait for ever on a thread that is gone.
            with self._condition:
                self._failed = True
                left = [*jobs, *self._jobs]
                self._jobs.clear()
                self._tasks.clear()
                self._condition.notify_all()
            for job in left:
                job.ticket.drop("closed")
                job.ticket.finish()

    def _commit_safely(self, jobs: Sequence[PutJob], tasks: Sequence[_Waiting]) -> None:
        for task in tasks:
            _prepare(task)
        try:
            self._commit(jobs, [task.write for task in tasks])
        except (KvdbError, OSError) as error:
            self._say(f"not stored: {error}")
            reason = type(error).__name__
        except Exception:
            # The border of the thread: a bug met here must cost this group, not all that follow.
            log.exception("not stored, by a defect of kvdb")
            reason = "defect"
        else:
            return
        for job in jobs:
            job.ticket.drop(reason)

    def _say(self, message: str) -> None:
        """Warn, about the same thing at most once a minute."""
        now = self._seconds()
        if message != self._said[0] or now - self._said[1] >= SAY_AGAIN_SECONDS:
            log.warning("%s", message)
            self._said = (message, now)

    def _take(self) -> tuple[list[PutJob], list[_Waiting]]:
        jobs: list[PutJob] = []
        size = 0
        while self._jobs and (not jobs or size + self._jobs[0].nbytes <= self._group_bytes):
            jobs.append(self._jobs.popleft())
            size += jobs[-1].nbytes
        self._taken += len(jobs)
        tasks: list[_Waiting] = []
        while self._tasks and self._tasks[0].after <= self._taken:
            tasks.append(self._tasks.popleft())
        return jobs, tasks

    def _finish(self, jobs: Sequence[PutJob]) -> None:
        with self._condition:
            self._bytes -= sum(job.nbytes for job in jobs)
        for job in jobs:
            job.ticket.finish()


def _prepare(task: _Waiting) -> None:
    try:
        if task.prepare is not None:
            task.prepare()
    except Exception:
        # The border of the thread: blocks wait beside this task, and are worth more than it.
        log.exception("a record lacks its parts, by a defect of kvdb")


def _cut(job: PutJob, kept: int) -> PutJob:
    return PutJob(
        job.namespace,
        job.record,
        job.hashes,
        job.tokens,
        job.extra_keys,
        job.payloads[:kept],
        job.origin,
        job.exact,
        job.build_id,
        job.build_digest,
        job.advance_id,
        job.ticket,
    )


def check_payloads(namespace: Namespace, tokens: int, payloads: Sequence[Payload]) -> None:
    """Raise UsageError unless payloads are the last blocks of ``tokens`` tokens, in order, and
    their parts have the names and sizes that the layout gives them."""
    size = namespace.block_tokens
    last = -(-tokens // size) - 1
    expected = range(last - len(payloads) + 1, last + 1)
    if not payloads or [payload.index for payload in payloads] != list(expected):
        raise UsageError("Payloads must be the last blocks of the given tokens, in order.")
    for payload in payloads:
        count = min(size, tokens - payload.index * size)
        if not payload.parts:
            raise UsageError(f"Payload of block {payload.index} has no parts.")
        for name, part in payload.parts.items():
            spec = namespace.layout.by_name.get(name)
            if spec is None:
                raise UsageError(f"The layout has no part {name!r}.")
            if not isinstance(part, np.ndarray):
                raise UsageError(f"Part {name!r} of block {payload.index} must be a numpy array.")
            flat = part.dtype == np.uint8 and part.ndim == 1 and part.flags.c_contiguous
            if not flat or part.nbytes != spec.nbytes(count):
                raise UsageError(
                    f"Part {name!r} of block {payload.index} must be {spec.nbytes(count)} bytes "
                    f"of contiguous uint8, not {part.nbytes} of {part.dtype}."
                )


def fitting(layout: Layout, payloads: Sequence[Payload], block_bytes: int) -> tuple[Payload, ...]:
    """Payloads without the optional parts that would make a block larger than may be stored."""
    kept: list[Payload] = []
    for payload in payloads:
        parts = {name: raw for name, raw in payload.parts.items() if name in layout.required}
        large = payload.nbytes > block_bytes and bool(parts)
        kept.append(Payload(payload.index, parts) if large else payload)
    return tuple(kept)
