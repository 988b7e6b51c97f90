"""What is served: models in a pool, requests on their way, and how many may wait."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from engine.events import End, Event, Priority, Progress, Request, Token
from engine.http.errors import NotServed, Stopping
from engine.http.events import Item, Mailbox, Post
from engine.http.tokens import TokenTexts
from kvdb.errors import Busy

if TYPE_CHECKING:
    from engine.engine import Handle
    from engine.models import ModelFacts
    from engine.pool import Pool
    from kvdb.segments import Segment
    from kvdb.store import Store

log = logging.getLogger("kvdb.http")

State = Literal["waiting", "prefill", "decode"]
# How fast the mean time of a request follows the newest one.
SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Served:
    """One model: ``aliases`` are other names (``*`` fits any text) that clients may call it by;
    the rest is what holds where a request says nothing."""

    name: str
    aliases: tuple[str, ...] = ()
    max_tokens: int = 4096
    sampling: Mapping[str, Any] = field(default_factory=dict)
    reuse: Literal["max", "exact"] = "max"
    max_running: int = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may be. ``max_waiting`` requests wait beside those that run."""

    max_waiting: int = 64
    max_messages: int = 10_000
    max_tokens: int | None = None
    request_seconds: float | None = None
    keep_alive_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Running:
    """A request that has not ended. ``done`` of ``total`` prompt tokens have their state; ``since``
    is Unix seconds."""

    id: str
    model: str
    tenant: str
    client: str
    priority: Priority
    state: State
    done: int
    total: int
    generated: int
    since: float


@dataclass(frozen=True, slots=True)
class Drained:
    """How serving ended: requests that were finished, and those that were parked: cut short with
    the state they had come to."""

    finished: int
    parked: int


class Answering:
    """One request on its way, on the loop's side."""

    def __init__(self, id_: str, model: str, request: Request, since: float) -> None:
        self.id = id_
        self.model = model
        self.request = request
        self.state: State = "waiting"
        self.done = self.total = self.generated = 0
        self.since = since
        self.parked = False  # cut short because the server stops
        self._handle: Handle | None = None
        self._mailbox = Mailbox()
        self._left = request.n

    @property
    def ended(self) -> bool:
        return self._left <= 0

    def begin(self, handle: Handle) -> None:
        self._handle = handle

    def take(self, item: Item) -> None:
        """An item came from the engine."""
        if isinstance(item, Token):
            self.state = "decode"
            self.generated += 1
        elif isinstance(item, Progress):
            self.state, self.done, self.total = "prefill", item.done, item.total
        elif isinstance(item, End):
            self._left -= 1
        else:
            self._left = 0
        self._mailbox.put(item)

    async def events(self, timeout: float | None = None) -> list[Event]:
        """What came, after waiting for the first of it; nothing after ``timeout`` seconds. Raises
        what the engine raised."""
        items = await self._mailbox.take(timeout)
        events: list[Event] = []
        for item in items:
            if isinstance(item, BaseException):
                raise item
            events.append(item)
        return events

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    @property
    def prompt_end(self) -> str:
        """The end of the prompt's text, once an event came."""
        return "" if self._handle is None else self._handle.prompt_end

    def segments(self) -> Sequence[Segment]:
        """The parts of the prompt, once an event came. May take some milliseconds."""
        return () if self._handle is None else self._handle.segments()

    def shown(self) -> Running:
        request = self.request
        return Running(
            self.id,
            self.model,
            request.tenant,
            request.client,
            request.priority,
            self.state,
            self.done,
            self.total,
            self.generated,
            self.since,
        )


class Service:
    """Requests to the models of a pool. Every method runs on one event loop's thread.

    The pool and the store stay the caller's. ``adapt`` changes each request before it is run:
    tests play scripts with it.
    """

    def __init__(
        self,
        pool: Pool,
        store: Store | None,
        models: Sequence[Served],
        limits: Limits | None = None,
        *,
        now: Callable[[], float] = time.time,
        adapt: Callable[[Request], Request] | None = None,
    ) -> None:
        self.pool = pool
        self.store = store
        self.models = {model.name: model for model in models}
        self.limits = limits or Limits()
        self.now = now
        self.started = now()
        self.stopping = False
        self.ready = False  # the models that were asked for at the start are in memory
        # Told of the end of each answer, and of each failure, by the model's name.
        self.observe: Callable[[str, End | BaseException], None] | None = None
        self._adapt = adapt
        self._post: Post | None = None
        self._facts: dict[str, ModelFacts] = {}
        self._texts: dict[str, TokenTexts] = {}
        self._active: dict[int, Answering] = {}
        self._numbers = itertools.count()
        self._seconds = 1.0  # what a request took, smoothed
        self._changed = asyncio.Event()

    def find(self, name: str) -> Served:
        """The model that clients call ``name``. Raises NotServed: a client's word alone loads
        nothing from this machine or the hub."""
        if name in self.models:
            return self.models[name]
        for model in self.models.values():
            if any(fnmatchcase(name, alias) for alias in model.aliases):
                return model
        known = ", ".join(self.models) or "none"
        raise NotServed(f"The model {name[:200]!r} is not served here; served: {known}.")

    def facts(self, model: str) -> ModelFacts | None:
        """What is known of a model, if it was in memory once."""
        facts = self.pool.facts(model)
        if facts is not None:
            self._facts[model] = facts
        return self._facts.get(model)

    async def loaded_facts(self, model: str) -> ModelFacts:
        """The same; a model that is not in memory is loaded."""

        def load() -> ModelFacts:
            with self.pool.engine(model) as engine:
                return engine.facts

        facts = self.facts(model)
        return await asyncio.to_thread(load) if facts is None else facts

    async def count(self, model: str, request: Request) -> int:
        """How many tokens the prompt of a request has, between two steps of the engine: counted by
        what would run it, with the tokens of earlier answers. Raises PromptError."""

        def count() -> int:
            with self.pool.engine(model) as engine:
                return engine.call(lambda worker: len(worker.encode(request).tokens))

        return await asyncio.to_thread(count)

    def texts(self, model: str) -> TokenTexts:
        """The texts of a model's tokens."""
        if model not in self._texts:
            facts = self.facts(model)
            self._texts[model] = TokenTexts(None if facts is None else facts.prompts)
        return self._texts[model]

    def open(self, model: Served, request: Request, id_: str | None = None) -> Answering:
        """Hand a request in. Raises Stopping, Busy, EngineClosed."""
        if self.stopping:
            raise Stopping("The server is being shut down.")
        here = sum(active.model == model.name for active in self._active.values())
        if here >= model.max_running + self.limits.max_waiting:
            raise Busy(
                f"{here} requests are at work or waiting already: try again later.",
                self._seconds * (here - model.max_running + 1) / model.max_running,
            )
        if self._adapt is not None:
            request = self._adapt(request)
        answering = Answering(id_ or uuid.uuid4().hex, model.name, request, self.now())
        number = next(self._numbers)
        began = time.monotonic()

        def receive(item: Item) -> None:
            answering.take(item)
            if self.observe is not None and isinstance(item, End | BaseException):
                self.observe(model.name, item)
            if answering.ended and self._active.pop(number, None) is not None:
                self._seconds += SMOOTHING * (time.monotonic() - began - self._seconds)
                self._changed.set()

        if self._post is None:
            self._post = Post(asyncio.get_running_loop())
        self._active[number] = answering
        try:
            answering.begin(self.pool.submit(model.name, request, self._post.sink(receive)))
        except BaseException:
            del self._active[number]
            raise
        return answering

    def running(self) -> list[Running]:
        """The requests that have not ended, in order of arrival."""
        return [active.shown() for active in self._active.values()]

    async def drain(self, seconds: float) -> Drained:
        """Take no more requests; give those that run ``seconds`` to end, then park them."""
        self.stopping = True
        before = len(self._active)
        await self._until_idle(seconds)
        parked = list(self._active.values())
        for answering in parked:
            answering.parked = True
            answering.cancel()
        await self._until_idle(seconds)
        return Drained(before - len(parked), len(parked))

    async def _until_idle(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._active and (left := until - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return
