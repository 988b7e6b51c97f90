"""Engine: one thread makes every MLX call; callers hand it requests and iterate over events."""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from engine import blas
from engine.events import End, Event, Request
from engine.models import ModelOptions
from engine.options import EngineOptions
from kvdb.errors import KvdbError

if TYPE_CHECKING:
    from engine.guard import Guard
    from engine.worker import Worker
    from kvdb.store import Store

T = TypeVar("T")


class EngineClosed(KvdbError):
    """The engine was closed before it could answer."""


@dataclass(frozen=True, slots=True)
class _Job:
    request: Request
    events: queue.SimpleQueue[Event | BaseException] = field(default_factory=queue.SimpleQueue)
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class _Call:
    action: Callable[[Worker], Any]
    result: Future[Any] = field(default_factory=Future)


class _Inbox:
    """What waits for the MLX thread, in order of arrival; once closed it takes nothing more."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._queue: queue.SimpleQueue[_Job | _Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def put(self, job: _Job | _Call) -> None:
        with self._lock:  # else a job could slip in behind the end mark and wait for ever
            if self.closed.is_set():
                raise EngineClosed("The engine is closed.")
            self._queue.put(job)

    def get(self) -> _Job | _Call | None:
        return self._queue.get()

    def close(self) -> None:
        with self._lock:
            if not self.closed.is_set():
                self.closed.set()
                self._queue.put(None)


class Engine:
    """A model that answers requests with state from ``store`` (None: without any).

    The store stays the caller's, who closes it after the engine. One request runs at a time, in
    the order of arrival. Safe to use from several threads.
    """

    def __init__(
        self,
        store: Store | None,
        model: str,
        *,
        model_options: ModelOptions | None = None,
        options: EngineOptions | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Load ``model``: a folder, a hub id or a built-in name. Engines of one process share a
        ``guard``; without one ``options.max_memory`` holds for this engine alone.

        Raises ModelError or UsageError; a store that cannot be used is logged and left out."""
        self.model = model
        self._inbox = _Inbox()

        def make(loaded: blas.Blas) -> Worker:
            from engine.worker import Worker

            return Worker(
                store,
                model,
                model_options or ModelOptions(),
                options or EngineOptions(),
                loaded,
                guard,
            )

        ready: Future[None] = Future()
        thread = threading.Thread(
            target=_serve, name="kvdb-mlx", daemon=True, args=(self._inbox, ready, make)
        )
        thread.start()
        # Also when a program ends without close: MLX aborts it while a thread's stream is left.
        self._stop = weakref.finalize(self, _stop, self._inbox, thread)
        try:
            ready.result()
        except BaseException:  # interrupted too: the thread must not outlive what it was given
            self._stop()
            raise
        if store is not None and options is not None and options.warm:
            from engine.sequences import warm_up

            warm_up(self, store, options.warm)

    def generate(self, request: Request) -> Iterator[Event]:
        """The events of a request: Progress while the prompt is prepared, Tokens, one End.

        Work begins now. Closing the iterator cancels the request between two steps; what was
        computed by then is stored. Raises PromptError or UsageError from the first ``next``, and
        EngineClosed when the engine ends first.
        """
        job = _Job(request)
        self._inbox.put(job)
        return _Events(job)

    def call(self, action: Callable[[Worker], T]) -> T:
        """Run ``action`` with the worker on the MLX thread, between requests, and return its
        result. No MLX array may leave it."""
        call = _Call(action)
        self._inbox.put(call)
        result: T = call.result.result()
        return result

    def close(self) -> None:
        """Cancel what runs, refuse what waits, end the thread. Idempotent."""
        self._stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _stop(inbox: _Inbox, thread: threading.Thread) -> None:
    inbox.close()
    if thread is not threading.current_thread():
        thread.join()


def _serve(inbox: _Inbox, ready: Future[None], make: Callable[[blas.Blas], Worker]) -> None:
    """The MLX thread: load, then answer in order until the inbox is closed and empty."""
    try:
        try:
            worker = make(blas.preload())  # BLAS before anything imports mlx.core
        except BaseException as error:  # it belongs to the caller, who is waiting for it
            ready.set_exception(error)
            return
        ready.set_result(None)
        while (job := inbox.get()) is not None:
            if isinstance(job, _Call):
                _answer(job, worker)
            else:
                _run(job, worker, inbox.closed)
    finally:
        if "mlx.core" in sys.modules:
            from engine.mlxlm import release_thread

            release_thread()


def _answer(call: _Call, worker: Worker) -> None:
    try:
        call.result.set_result(call.action(worker))
    except BaseException as error:  # it belongs to the caller, who is waiting for it
        call.result.set_exception(error)


def _run(job: _Job, worker: Worker, closed: threading.Event) -> None:
    if closed.is_set():
        job.events.put(EngineClosed("The engine was closed."))
        return
    try:
        for event in worker.run(job.request, lambda: job.cancelled.is_set() or closed.is_set()):
            job.events.put(event)
    except BaseException as error:  # it belongs to the caller, who is waiting for it
        job.events.put(error)


class _Events(Iterator[Event]):
    """A request's events as they come. Closing or dropping it cancels the request, begun or not."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._ended = False

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        item = self._job.events.get()
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        self._ended = isinstance(item, End)
        return item

    def close(self) -> None:
        """Cancel the request between two steps; no more events come."""
        self._ended = True
        self._job.cancelled.set()

    def __del__(self) -> None:
        self._job.cancelled.set()
