"""Engine: one thread makes every MLX call; callers hand it requests and iterate over events."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from engine import blas
from engine.events import End, Event, Load, Request
from engine.models import ModelFacts, ModelOptions
from engine.options import EngineOptions
from kvdb.errors import KvdbError

if TYPE_CHECKING:
    from engine.guard import Guard
    from engine.prompt.encode import Prompt
    from engine.scheduler import Scheduler
    from engine.worker import Worker
    from kvdb.segments import Segment
    from kvdb.store import Store

T = TypeVar("T")
Sink = Callable[[Event | BaseException], None]
# While all requests wait for the disk or a remote, the thread looks for what is new: so soon at
# first, then always later by a part of the time waited, which costs and delays little.
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.0005, 0.01
POLL_GROWTH = 1 + 1 / 16
# So much of a prompt's end tells what its answer begins in.
PROMPT_END = 256


class EngineClosed(KvdbError):
    """The engine was closed before it could answer."""


class Handle:
    """A request on its way through the engine: what its client holds, and the scheduler asks."""

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request = request
        self.arrived = time.monotonic()
        self.cancelled = False
        self.put = sink
        self._prompt: Prompt | None = None

    def cancel(self) -> None:
        """End the request between two steps, begun or not; its Ends say ``cancelled``."""
        self.cancelled = True

    def accept(self, prompt: Prompt) -> None:
        """What the request came to as token ids. Called once, on the MLX thread."""
        self._prompt = prompt

    @property
    def prompt_end(self) -> str:
        """The last characters of the prompt's text, as far as there is one."""
        text = None if self._prompt is None else self._prompt.text
        return "" if text is None else text[-PROMPT_END:]

    def segments(self) -> Sequence[Segment]:
        """The parts of the prompt, once the first event came; see :meth:`Prompt.segments`."""
        return () if self._prompt is None else self._prompt.segments()


@dataclass(frozen=True, slots=True)
class _Call:
    action: Callable[[Worker], Any]
    result: Future[Any] = field(default_factory=Future)


class _Inbox:
    """What is new for the MLX thread, in order of arrival; once closed it takes nothing more."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._queue: queue.SimpleQueue[Handle | _Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def put(self, item: Handle | _Call) -> None:
        with self._lock:  # else one could slip in behind the end mark and wait for ever
            if self.closed.is_set():
                raise EngineClosed("The engine is closed.")
            self._queue.put(item)

    def take(self, timeout: float | None) -> Iterator[Handle | _Call]:
        """All that is there, after waiting for the first of it up to ``timeout`` seconds (None:
        as long as it takes, or until it is closed)."""
        with contextlib.suppress(queue.Empty):
            item = self._queue.get(timeout != 0, timeout)
            while item is not None:
                yield item
                item = self._queue.get_nowait()

    def close(self) -> None:
        with self._lock:
            if not self.closed.is_set():
                self.closed.set()
                self._queue.put(None)


class Engine:
    """A model that answers requests with state from ``store`` (None: without any).

    The store stays the caller's, who closes it after the engine. Requests run side by side, as
    ``options`` say. Safe to use from several threads.
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
        settings = options or EngineOptions()

        def make(loaded: blas.Blas) -> Scheduler:
            from engine.scheduler import Scheduler
            from engine.worker import Worker

            worker = Worker(store, model, model_options or ModelOptions(), settings, loaded, guard)
            return Scheduler(worker, settings)

        self._state = _State()
        ready: Future[ModelFacts] = Future()
        thread = threading.Thread(
            target=_serve,
            name="kvdb-mlx",
            daemon=True,
            args=(self._inbox, self._state, ready, make),
        )
        thread.start()
        # Also when a program ends without close: MLX aborts it while a thread's stream is left.
        self._stop = weakref.finalize(self, _stop, self._inbox, thread)
        try:
            self._facts = ready.result()
        except BaseException:  # interrupted too: the thread must not outlive what it was given
            self._stop()
            raise
        if store is not None and options is not None and options.warm:
            from engine.sequences import warm_up

            warm_up(self, store, options.warm)

    def generate(self, request: Request) -> Iterator[Event]:
        """The events of a request: Progress while the prompt is prepared, then Tokens and one End
        for each of its ``n`` answers.

        Work begins when it is this request's turn. Closing the iterator cancels it between two
        steps; what was computed by then is stored. Raises PromptError, UsageError or QuotaExceeded
        from the first ``next``, EngineClosed when the engine ends first, and whatever MLX raises
        for this request alone, as when it lacks memory.
        """
        events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        return _Events(self.submit(request, events.put), events)

    def submit(self, request: Request, sink: Sink) -> Handle:
        """As :meth:`generate`, for who must not wait: ``sink`` is called with each event, or with
        one exception instead of more of them, on the MLX thread. It must return at once and raise
        nothing. Raises EngineClosed."""
        handle = Handle(request, sink)
        self.enqueue(handle)
        return handle

    def enqueue(self, handle: Handle) -> None:
        """Take a request whose handle its client holds already. Raises EngineClosed."""
        self._inbox.put(handle)

    @property
    def facts(self) -> ModelFacts:
        """What of its model can be used on any thread."""
        return self._facts

    @property
    def closed(self) -> bool:
        """It takes no requests any more: it was closed, or ended by a defect."""
        return self._inbox.closed.is_set()

    def load(self) -> Load:
        """What the engine had to do after its last step, and the memory it took."""
        return self._state.load

    def call(self, action: Callable[[Worker], T]) -> T:
        """Run ``action`` with the worker on the MLX thread, between two steps, and return its
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

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class _State:
    """What the MLX thread lets others see."""

    load: Load = field(default_factory=Load)


def _stop(inbox: _Inbox, thread: threading.Thread) -> None:
    inbox.close()
    if thread is not threading.current_thread():
        thread.join()


def _serve(
    inbox: _Inbox,
    state: _State,
    ready: Future[ModelFacts],
    make: Callable[[blas.Blas], Scheduler],
) -> None:
    """The MLX thread: load, then take turns until the inbox is closed."""
    try:
        try:
            scheduler = make(blas.preload())  # BLAS before anything imports mlx.core
        except BaseException as error:  # it belongs to the caller, who is waiting for it
            ready.set_exception(error)
            return
        ready.set_result(scheduler.worker.facts)
        _take_turns(inbox, state, scheduler)
    finally:
        if "mlx.core" in sys.modules:
            from engine.mlxlm import release_thread

            release_thread()


def _take_turns(inbox: _Inbox, state: _State, scheduler: Scheduler) -> None:
    went_on, poll = False, POLL_SECONDS
    error: BaseException = EngineClosed("The engine was closed.")
    try:
        while not inbox.closed.is_set():
            timeout = None if scheduler.idle else 0 if went_on else poll
            for item in inbox.take(timeout):
                if isinstance(item, Handle):
                    scheduler.add(item)
                else:
                    _answer(item, scheduler.worker)
            if not inbox.closed.is_set():
                went_on = scheduler.turn()
                poll = POLL_SECONDS if went_on else min(poll * POLL_GROWTH, LONGEST_POLL_SECONDS)
                state.load = scheduler.load
    except BaseException as defect:
        error = defect
        raise
    finally:  # after a defect, too: nobody may wait for ever
        inbox.close()
        scheduler.close(error)
        state.load = scheduler.load
        for item in inbox.take(0):
            if isinstance(item, Handle):
                item.put(error)
            else:
                _answer(item, scheduler.worker)


def _answer(call: _Call, worker: Worker) -> None:
    try:
        call.result.set_result(call.action(worker))
    except BaseException as error:  # it belongs to the caller, who is waiting for it
        call.result.set_exception(error)


class _Events(Iterator[Event]):
    """A request's events as they come. Closing or dropping it cancels the request, begun or not."""

    def __init__(self, handle: Handle, events: queue.SimpleQueue[Event | BaseException]) -> None:
        self._handle = handle
        self._events = events
        self._open = handle.request.n

    def __next__(self) -> Event:
        if not self._open:
            raise StopIteration
        item = self._events.get()
        if isinstance(item, BaseException):
            self._open = 0
            raise item
        if isinstance(item, End):
            self._open -= 1
        return item

    def close(self) -> None:
        """Cancel the request between two steps; no more events come."""
        self._open = 0
        self._handle.cancel()

    def __del__(self) -> None:
        self._handle.cancel()
