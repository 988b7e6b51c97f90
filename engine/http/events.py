"""Events from the MLX threads to the event loop: many events, one wake-up, no thread a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from engine.events import Event

Item = Event | BaseException
Receiver = Callable[[Item], None]


class Post:
    """Carries items from any thread to receivers on ``loop``, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Receiver, Item]] = deque()
        self._called = False  # a delivery is due, and will find what is added meanwhile

    def sink(self, receiver: Receiver) -> Callable[[Item], None]:
        """A sink for :meth:`engine.Engine.submit`; ``receiver`` is called on the loop."""

        def put(item: Item) -> None:
            self._items.append((receiver, item))
            if not self._called:
                self._called = True
                with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
                    self._loop.call_soon_threadsafe(self._deliver)

        return put

    def _deliver(self) -> None:
        self._called = False  # before items are taken: what comes later calls again
        while self._items:
            receiver, item = self._items.popleft()
            receiver(item)


class Mailbox:
    """Items that wait on the loop until one reader takes them."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, timeout: float | None = None) -> list[Item]:
        """All that is there, after waiting for the first of it; none after ``timeout`` seconds."""
        if not self._items:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout is None else loop.call_later(timeout, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        items, self._items = self._items, []
        return items
