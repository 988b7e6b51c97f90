"""Several models in one process: loaded when they are asked for, unloaded when others need room.

Each model has an Engine, and so an MLX thread, of its own: MLX's streams and whatever waits on them
belong to the thread that made them, and only when that thread ends is all of it given back.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine import blas
from engine.engine import Engine, EngineClosed, Handle, Sink
from engine.events import End, Event, Request
from engine.models import ModelFacts, ModelOptions, weight_bytes
from engine.options import EngineOptions
from kvdb.errors import Busy, OutOfMemory

if TYPE_CHECKING:
    from kvdb.store import Store

DEFAULT_WAIT_SECONDS = 60.0


class ModelBusy(Busy):
    """A model cannot be loaded now: those that are loaded are all at work."""


@dataclass(frozen=True, slots=True)
class PooledModel:
    """How a pool treats one model. Unused for ``ttl_seconds`` it is unloaded (None: never for that
    reason); a ``pinned`` one is never unloaded to make room."""

    model_options: ModelOptions = field(default_factory=ModelOptions)
    engine_options: EngineOptions = field(default_factory=EngineOptions)
    ttl_seconds: float | None = None
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """At most ``max_models`` models with ``max_bytes`` of weights are loaded at once, and the
    process holds at most ``max_memory``; a request waits up to ``wait_seconds`` for its model.
    ``models`` have settings by name, others ``default``."""

    max_models: int | None = None
    max_bytes: int | None = None
    max_memory: int | None = None
    wait_seconds: float = DEFAULT_WAIT_SECONDS
    models: Mapping[str, PooledModel] = field(default_factory=dict)
    default: PooledModel = field(default_factory=PooledModel)


@dataclass(frozen=True, slots=True)
class ModelState:
    """A loaded model: bytes of weights, requests at work, seconds since the last one ended."""

    name: str
    nbytes: int
    users: int
    idle_seconds: float
    pinned: bool


@dataclass(slots=True, eq=False)
class _Slot:
    """``engine`` is None while it is loaded, and again while it is unloaded."""

    settings: PooledModel
    nbytes: int
    pinned: bool
    engine: Engine | None = None
    users: int = 0
    used_at: float = 0.0


class Pool:
    """Engines by model name over one store and under one memory guard. Thread-safe."""

    def __init__(
        self,
        store: Store | None,
        options: PoolOptions | None = None,
        *,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._options = options or PoolOptions()
        blas.preload()  # before anything imports mlx.core
        from engine.guard import Guard
        from engine.memory import gauges

        self.guard = Guard(self._options.max_memory, gauges())
        self._seconds = seconds
        self._slots: dict[str, _Slot] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._reaper: threading.Thread | None = None
        self._leaving = 0  # models that are being unloaded
        self.guard.when_short(self._unload_one)

    def generate(self, model: str, request: Request) -> Iterator[Event]:
        """The events of a request to ``model``, which stays loaded until they end or are closed.

        Raises ModelBusy, OutOfMemory or EngineClosed when the model cannot be had, ModelError for
        one that cannot be loaded; from then on what :meth:`Engine.generate` raises.
        """
        slot, engine = self._acquire(model)
        try:
            events = engine.generate(request)
        except BaseException:
            self._release(slot)
            raise
        return _Events(events, request.n, lambda: self._release(slot))

    def submit(self, model: str, request: Request, sink: Sink) -> Handle:
        """As :meth:`generate`, for who must not wait; see :meth:`Engine.submit`. A model that is
        not in memory is loaded on a thread of its own, and what goes wrong then comes to
        ``sink``. Raises EngineClosed."""
        counting = _Counting(sink, request.n)
        handle = Handle(request, counting)
        with self._changed:
            found = self._use(model)
        if found is None:
            threading.Thread(
                target=self._load_and_submit,
                name="kvdb-load",
                daemon=True,
                args=(model, handle, counting),
            ).start()
        else:
            self._enqueue(*found, handle, counting)
        return handle

    def _load_and_submit(self, model: str, handle: Handle, counting: _Counting) -> None:
        try:
            slot, engine = self._acquire(model)
            self._enqueue(slot, engine, handle, counting)
        except Exception as error:  # it belongs to the client, who is waiting for it
            counting(error)

    def _enqueue(self, slot: _Slot, engine: Engine, handle: Handle, counting: _Counting) -> None:
        counting.done = lambda: self._release(slot)
        try:
            engine.enqueue(handle)
        except BaseException:
            counting.end()
            raise

    @contextmanager
    def engine(self, model: str) -> Iterator[Engine]:
        """The engine of ``model``, which stays loaded meanwhile."""
        slot, engine = self._acquire(model)
        try:
            yield engine
        finally:
            self._release(slot)

    def facts(self, model: str) -> ModelFacts | None:
        """What is known of a model that is in memory."""
        with self._changed:
            slot = self._slots.get(model)
            return None if slot is None or slot.engine is None else slot.engine.facts

    def pin(self, model: str, pinned: bool = True) -> None:
        """Keep a model loaded, loading it if need be; or let it go again."""
        slot, _ = self._acquire(model)
        slot.pinned = pinned
        self._release(slot)

    def unload(self, model: str) -> bool:
        """Unload an idle model; False when it is at work or not loaded."""
        with self._changed:
            slot = self._slots.get(model)
            if slot is None or slot.engine is None or slot.users:
                return False
            engine = self._take_out(slot, slot.engine)
        self._unload(model, slot, engine)
        return True

    def expire(self) -> None:
        """Unload what was not used for its TTL. Runs by itself; public so that time can be made."""
        with self._changed:
            now = self._seconds()
            due = [name for name, slot in self._slots.items() if self._left(slot, now) <= 0]
        for name in due:
            self.unload(name)

    def loaded(self) -> list[ModelState]:
        """The models in memory, the latest used last."""
        with self._changed:
            now = self._seconds()
            return [
                ModelState(name, slot.nbytes, slot.users, now - slot.used_at, slot.pinned)
                for name, slot in sorted(self._slots.items(), key=lambda item: item[1].used_at)
                if slot.engine is not None
            ]

    def close(self) -> None:
        """Unload all; what runs is cancelled. Idempotent."""
        with self._changed:
            self._closed = True
            engines = [slot.engine for slot in self._slots.values() if slot.engine is not None]
            self._slots.clear()
            self._changed.notify_all()
        for engine in engines:
            engine.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._leaving)
        if self._reaper is not None:
            self._reaper.join()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- loading -----------------------------------------------------------------------------

    def _acquire(self, name: str) -> tuple[_Slot, Engine]:
        """A loaded model, with one more user."""
        with self._changed:
            found = self._use(name)
        return found or self._bring_in(name, self._size(name))

    def _use(self, name: str) -> tuple[_Slot, Engine] | None:
        """With the lock held: a model that is there."""
        if self._closed:
            raise EngineClosed("The model pool is closed.")
        slot = self._slots.get(name)
        if slot is None or slot.engine is None:
            return None
        if slot.engine.closed:  # it met a defect: another one takes its place
            self._begin_unload(name, slot, slot.engine)
            return None
        slot.users += 1
        return slot, slot.engine

    def _size(self, name: str) -> int:
        nbytes, most = weight_bytes(name), self._options.max_bytes
        if most is not None and nbytes > most:
            raise OutOfMemory(
                f"{name} has {nbytes >> 20} MiB of weights, and the pool may hold {most >> 20}."
            )
        return nbytes

    def _bring_in(self, name: str, nbytes: int) -> tuple[_Slot, Engine]:
        """Load a model, after others made room for it; or use what another caller loaded."""
        settings = self._options.models.get(name, self._options.default)
        until = self._seconds() + self._options.wait_seconds
        while True:
            with self._changed:
                if found := self._use(name):
                    return found
                if name not in self._slots:  # else it is being loaded, or unloaded
                    if self._take_room(nbytes):
                        slot = self._slots[name] = _Slot(settings, nbytes, settings.pinned)
                        break
                    if not self._slots:
                        raise OutOfMemory(f"There is no memory for the model {name}.")
                victim = None if name in self._slots else self._idle()
                if victim is None:
                    self._wait(name, until)
                    continue
            self.unload(victim)
        return self._load(name, slot)

    def _take_room(self, nbytes: int) -> bool:
        """With the lock held: keep room for a model of so many bytes, if there is any beside the
        others."""
        options = self._options
        held = sum(slot.nbytes for slot in self._slots.values())
        return (
            (options.max_models is None or len(self._slots) < options.max_models)
            and (options.max_bytes is None or held + nbytes <= options.max_bytes)
            and self.guard.expect(nbytes)  # last: it keeps the room
        )

    def _idle(self) -> str | None:
        """With the lock held: the model that was not used for longest, if any may go."""
        idle = {
            name: slot.used_at
            for name, slot in self._slots.items()
            if slot.engine is not None and not slot.users and not slot.pinned
        }
        return min(idle, key=lambda name: idle[name], default=None)

    def _wait(self, name: str, until: float) -> None:
        """With the lock held: wait for a change. Raises ModelBusy after ``until``."""
        left = until - self._seconds()
        if left <= 0 or not self._changed.wait(left):
            raise ModelBusy(f"{name} cannot be loaded now: the models in memory are at work.")

    def _load(self, name: str, slot: _Slot) -> tuple[_Slot, Engine]:
        try:
            engine = Engine(
                self._store,
                name,
                model_options=slot.settings.model_options,
                options=slot.settings.engine_options,
                guard=self.guard,
            )
        except BaseException:
            self.guard.arrived(slot.nbytes, loaded=False)
            with self._changed:
                self._slots.pop(name, None)
                self._changed.notify_all()
            raise
        self.guard.arrived(slot.nbytes, loaded=True)
        with self._changed:
            slot.engine, slot.users, slot.used_at = engine, 1, self._seconds()
            closed = self._closed
            if slot.settings.ttl_seconds is not None and self._reaper is None and not closed:
                self._reaper = threading.Thread(target=self._reap, name="kvdb-pool", daemon=True)
                self._reaper.start()
            self._changed.notify_all()
        if closed:
            engine.close()
            raise EngineClosed("The model pool is closed.")
        return slot, engine

    def _release(self, slot: _Slot) -> None:
        with self._changed:
            slot.users -= 1
            slot.used_at = self._seconds()
            self._changed.notify_all()

    def _unload_one(self) -> bool:
        """Begin to unload the model that was not used for longest; False where none may go. On a
        thread of its own: an engine's must not wait for another's."""
        with self._changed:
            victim = self._idle()
            if self._leaving or victim is None:
                return self._leaving > 0
            slot = self._slots[victim]
            if slot.engine is not None:
                self._begin_unload(victim, slot, slot.engine)
            return True

    def _begin_unload(self, name: str, slot: _Slot, engine: Engine) -> None:
        """With the lock held."""
        threading.Thread(
            target=self._unload,
            name="kvdb-unload",
            daemon=True,
            args=(name, slot, self._take_out(slot, engine)),
        ).start()

    def _take_out(self, slot: _Slot, engine: Engine) -> Engine:
        """With the lock held: nobody finds the engine any more; to be followed by _unload."""
        slot.engine = None
        self._leaving += 1
        return engine

    def _unload(self, name: str, slot: _Slot, engine: Engine) -> None:
        from engine.memory import release_memory

        try:
            engine.close()
            del engine
            gc.collect()  # layers and their modules refer to each other
            release_memory()
            self.guard.left(slot.nbytes)
        finally:
            with self._changed:
                self._slots.pop(name, None)
                self._leaving -= 1
                self._changed.notify_all()

    def _left(self, slot: _Slot, now: float) -> float:
        """Seconds until a slot's TTL ends; endless while it is used, pinned or has none."""
        ttl = slot.settings.ttl_seconds
        if ttl is None or slot.engine is None or slot.users or slot.pinned:
            return float("inf")
        return slot.used_at + ttl - now

    def _reap(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = self._seconds()
                left = min((self._left(slot, now) for slot in self._slots.values()), default=1e9)
                if left > 0:
                    self._changed.wait(min(left, 3600.0))
                    continue
            self.expire()


class _Counting:
    """A sink that gives the model back, by ``done``, before the last event goes on."""

    def __init__(self, sink: Sink, answers: int) -> None:
        self._sink = sink
        self._left = answers
        self.done: Callable[[], None] | None = None

    def __call__(self, item: Event | BaseException) -> None:
        if isinstance(item, BaseException):
            self._left = 0
        elif isinstance(item, End):
            self._left -= 1
        if self._left <= 0:
            self.end()
        self._sink(item)

    def end(self) -> None:
        done, self.done = self.done, None
        if done is not None:
            done()


class _Events(Iterator[Event]):
    """A request's events; gives its model back once, at the end of them or when dropped."""

    def __init__(self, events: Iterator[Event], answers: int, done: Callable[[], None]) -> None:
        self._events = events
        self._left = answers
        self._done: Callable[[], None] | None = done

    def __next__(self) -> Event:
        try:
            event = next(self._events)
        except BaseException:
            self._end()
            raise
        if isinstance(event, End):
            self._left -= 1
            if not self._left:
                self._end()
        return event

    def close(self) -> None:
        """Cancel the request; no more events come."""
        close: Callable[[], None] = getattr(self._events, "close", lambda: None)
        close()
        self._end()

    def _end(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done()

    def __del__(self) -> None:
        self._end()
