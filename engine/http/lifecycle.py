"""A server's life: from the first line to the last request that is finished or parked."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from kvdb.errors import UsageError

if TYPE_CHECKING:
    from engine.http.service import Drained, Service
    from engine.models import ModelFacts

# What is left of a connection after its request was parked gets this long to be sent.
CLOSING_SECONDS = 5
STILL_SECONDS = 5.0
# How long a model's thread may keep the interpreter from the event loop, which needs it for each
# write to a client: with Python's 5 ms a first token would wait for it several times.
SWITCH_SECONDS = 0.0005
BACKLOG = 2048


class Server(uvicorn.Server):
    """Loads ``models`` once it listens. The first signal takes no more requests, gives those that
    run ``drain_seconds`` and parks the rest; the second one ends the process at once.

    ``say`` is told what goes on. After :meth:`run`, ``drained`` says how requests ended, and
    ``failure`` why a model could not be loaded.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        models: Sequence[str],
        *,
        drain_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        config.timeout_graceful_shutdown = CLOSING_SECONDS
        super().__init__(config)
        self.drained: Drained | None = None
        self.failure: Exception | None = None
        self._service = service
        self._models = models
        self._drain_seconds = drain_seconds
        self._say = say
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            super().run(sockets)
        finally:
            sys.setswitchinterval(before)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._start(self._load())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + sig)
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(lambda: self._start(self._stop()))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self) -> None:
        for server in self.servers:
            server.close()
        if count := len(self._service.running()):
            self._say(
                f"Stopping: {count} requests have {self._drain_seconds:g} s to end. "
                "Once more ends at once."
            )
        self.drained = await self._service.drain(self._drain_seconds)
        self.should_exit = True

    async def _load(self) -> None:
        """Load the models one after the other; one that cannot be ends the server."""
        for name in self._models:
            self._say(f"Loading {name} …")
            loading = asyncio.ensure_future(self._service.loaded_facts(name))
            seconds = 0.0
            while not (await asyncio.wait([loading], timeout=STILL_SECONDS))[0]:
                seconds += STILL_SECONDS
                self._say(f"Still loading {name} ({seconds:g} s)")
            try:
                self._say(_ready(loading.result()))
            except Exception as error:  # it belongs to who started the server
                self.failure = error
                self.should_exit = True
                return
        self._service.ready = True


def _ready(facts: ModelFacts) -> str:
    return (
        f"{facts.name} is ready: loaded in {facts.load_seconds:.1f} s, warmed up in "
        f"{facts.warmup_seconds:.1f} s"
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises UsageError where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only of a socket that says it is TCP does asyncio switch Nagle's algorithm off, and with that
    # on the second piece of a stream waits 40 ms for the client's acknowledgement of the first.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise UsageError(f"{host}:{port} cannot be listened on: {error.strerror}.") from error
    return listening


def url(listening: socket.socket) -> str:
    """Where a client finds it."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
