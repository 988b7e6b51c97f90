"""Bodies too large for memory, between the event loop and a thread that reads or writes them.

Whatever ends the other side ends this one: a client that goes away, that is too slow or sends too
much, and a thread that fails. At most a few pieces are in memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.http.errors import RETRY_SECONDS, Gone, Stopping, TooLarge, TooSlow
from kvdb.errors import Busy, KvdbError

T = TypeVar("T")

PLACES = 4
PLACES_EACH = 2  # of one tenant, so that it cannot keep others waiting
PIECES = 4
PIECE_BYTES = 1 << 20
# Slower clients would hold a place, and what they have staged, for hours.
LEAST_RATE = 64 << 10
SECONDS = 30.0


class Transfers:
    """Threads that stream, a few at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(PLACES, "kvdb-transfer")
        self._taken: Counter[str] = Counter()
        self.stopping = threading.Event()
        self.waiting: set[asyncio.Task[bytes]] = set()  # for clients

    def take(self, tenant: str) -> None:
        """Take a place, to be given back with :meth:`give_back`. On the event loop. Raises Busy."""
        if self._taken.total() >= PLACES or self._taken[tenant] >= PLACES_EACH:
            raise Busy("Enough snapshots are on their way: try again later.", RETRY_SECONDS)
        self._taken[tenant] += 1

    def give_back(self, tenant: str) -> None:
        self._taken[tenant] -= 1
        self._taken += Counter()  # forgets tenants without any

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Do ``work`` on one of the threads."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def close(self) -> None:
        """End what is on its way, and wait for it: the store is about to close."""
        self.stopping.set()
        for task in self.waiting:
            task.cancel()
        await asyncio.to_thread(self._threads.shutdown)


class Inbox:
    """A request's body for a thread: ``readinto`` waits for the client. Raises Gone, TooSlow,
    TooLarge, Stopping."""

    def __init__(self, request: Request, most: int, transfers: Transfers) -> None:
        self._loop = asyncio.get_running_loop()
        self._request, self._most, self._transfers = request, most, transfers
        self._seconds = SECONDS
        self._began = self._loop.time()
        self._size, self._ended = 0, False
        self._rest = memoryview(b"")

    def readinto(self, buffer: memoryview, /) -> int:
        """Called in the thread."""
        while not self._rest and not self._ended:
            coming = asyncio.run_coroutine_threadsafe(self._watched(), self._loop)
            try:
                self._rest = memoryview(coming.result())
            except CancelledError as error:
                raise Stopping("The server is being shut down.") from error
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    async def _watched(self) -> bytes:
        if self._transfers.stopping.is_set():
            raise Stopping("The server is being shut down.")
        coming = asyncio.ensure_future(self._next())
        self._transfers.waiting.add(coming)
        try:
            return await coming
        finally:
            self._transfers.waiting.discard(coming)

    async def _next(self) -> bytes:
        try:
            async with asyncio.timeout(self._seconds):
                message = await self._request.receive()
        except TimeoutError as error:
            raise TooSlow(f"Nothing came for {self._seconds:g} s.") from error
        if message["type"] == "http.disconnect":
            raise Gone("The client has gone.")
        body: bytes = message.get("body", b"")
        self._size += len(body)
        self._ended = not message.get("more_body", False)
        if self._size > self._most:
            raise TooLarge(f"The body is larger than {self._most} bytes.")
        if self._loop.time() - self._began > self._seconds + self._size / LEAST_RATE:
            raise TooSlow(f"The body comes more slowly than {LEAST_RATE} bytes a second.")
        return body


class Outbox(Generic[T]):
    """What a thread writes, as a stream: ``write`` waits until the client has taken what came
    before. Raises Gone, Stopping."""

    def __init__(self, transfers: Transfers, work: Callable[[Outbox[T]], T]) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(PIECES)
        self._transfers = transfers
        self._written = bytearray()
        self._gone = False
        self._done = transfers.run(lambda: self._run(work))

    def _run(self, work: Callable[[Outbox[T]], T]) -> T:
        try:
            result = work(self)
            if self._written:
                self._put(bytes(self._written))
            return result
        finally:
            self._put(None)

    def write(self, data: memoryview, /) -> int:
        """Called in the thread."""
        for at in range(0, len(data), PIECE_BYTES):
            self._written += data[at : at + PIECE_BYTES]
            if len(self._written) >= PIECE_BYTES:
                self._put(bytes(self._written))
                self._written.clear()
        return len(data)

    def _put(self, piece: bytes | None) -> None:
        asyncio.run_coroutine_threadsafe(self._pieces.put(piece), self._loop).result()
        if piece is not None and self._transfers.stopping.is_set():
            raise Stopping("The server is being shut down.")
        if piece is not None and self._gone:
            raise Gone("The client has gone, or takes nothing.")

    async def begun(self) -> bytes:
        """The first piece, when it is there. Raises what the thread failed with before."""
        try:
            piece = await self._pieces.get()
        except BaseException:
            await self.abandon()
            raise
        if piece is None:
            await self._done
        return piece or b""

    async def pieces(self, first: bytes) -> AsyncGenerator[bytes]:
        """All pieces. Raises what the thread failed with."""
        try:
            piece: bytes | None = first
            while piece is not None:
                yield piece
                piece = await self._pieces.get()
            await self._done
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        """Let the thread end: nobody takes what it writes."""
        self._gone = True
        while not self._done.done():
            while not self._pieces.empty():
                self._pieces.get_nowait()
            await asyncio.wait([self._done], timeout=0.01)
        self._done.exception()  # seen: whoever waits for it was told


class SnapshotStream(Response):
    """A stream that ends with its client, and does not wait for one that reads nothing. When it
    fails, the connection is closed without an end to the body, so the client sees it cut short."""

    media_type = "application/x-tar"

    def __init__(self, pieces: AsyncGenerator[bytes], name: str, ended: Callable[[], None]) -> None:
        self._pieces, self._ended = pieces, ended
        self.status_code = 200
        self.background = None
        self.init_headers({"content-disposition": f'attachment; filename="{name}"'})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_gone(receive))
        try:
            async with aclosing(self._pieces) as pieces:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                with suppress(TimeoutError, KvdbError):
                    async for piece in pieces:
                        async with asyncio.timeout(SECONDS):
                            await send(
                                {"type": "http.response.body", "body": piece, "more_body": True}
                            )
                        if gone.done():
                            return
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._ended()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
