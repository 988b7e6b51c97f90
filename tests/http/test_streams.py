"""Streams between a thread and a client that stops, stalls, trickles or goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from engine.http import streams
from engine.http.errors import Gone, Stopping, TooLarge, TooSlow
from engine.http.streams import PIECE_BYTES, PIECES, Inbox, Outbox, Transfers
from kvdb.errors import Busy, UsageError


def on_a_loop(work: Callable[[Transfers], Awaitable[None]]) -> None:
    async def run() -> None:
        transfers = Transfers()
        try:
            await asyncio.wait_for(work(transfers), 30)
        finally:
            await transfers.close()

    asyncio.run(run())


class Endless:
    """Writes until it is stopped, and remembers by what."""

    def __init__(self) -> None:
        self.written, self.error = 0, None

    def __call__(self, target: Outbox[None]) -> None:
        try:
            while True:
                self.written += target.write(memoryview(bytes(PIECE_BYTES)))
        except BaseException as error:
            self.error = type(error)  # type: ignore[assignment]
            raise


def test_a_writer_waits_for_its_client_and_ends_with_it() -> None:
    async def work(transfers: Transfers) -> None:
        endless = Endless()
        outbox = Outbox(transfers, endless)
        pieces = outbox.pieces(await outbox.begun())
        for _ in range(3):
            assert len(await anext(pieces)) == PIECE_BYTES
        await asyncio.sleep(0)
        assert endless.written <= (3 + PIECES + 2) * PIECE_BYTES
        await pieces.aclose()
        assert endless.error is Gone

    on_a_loop(work)


def test_a_writer_ends_with_the_server() -> None:
    async def work(transfers: Transfers) -> None:
        endless = Endless()
        outbox = Outbox(transfers, endless)
        pieces = outbox.pieces(await outbox.begun())
        transfers.stopping.set()
        with pytest.raises(Stopping):
            async for _ in pieces:
                pass
        assert endless.error is Stopping

    on_a_loop(work)


def test_failures_before_and_after_the_first_piece() -> None:
    def fail(pieces: int) -> Callable[[Outbox[None]], None]:
        def run(target: Outbox[None]) -> None:
            for _ in range(pieces):
                target.write(memoryview(bytes(PIECE_BYTES)))
            raise UsageError("No.")

        return run

    async def work(transfers: Transfers) -> None:
        with pytest.raises(UsageError):
            await Outbox(transfers, fail(0)).begun()
        outbox = Outbox(transfers, fail(2))
        first = await outbox.begun()
        with pytest.raises(UsageError):
            async for _ in outbox.pieces(first):
                pass

    on_a_loop(work)


class Client:
    """A request whose body comes as ``messages`` say; after them it is silent."""

    def __init__(self, messages: Sequence[dict[str, Any]]) -> None:
        self._messages = iter(messages)

    async def receive(self) -> dict[str, Any]:
        for message in self._messages:
            return message
        return await asyncio.Future()


def piece(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


GONE = {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("messages", "ends"),
    [
        ([piece(b"abc"), piece(b""), piece(b"defgh", False)], b"abcdefgh"),
        ([piece(b"", False)], b""),
        ([piece(b"abc"), GONE], Gone),
        ([piece(b"abc")], TooSlow),
        ([piece(b"x" * 60), piece(b"y" * 60)], TooLarge),
    ],
)
def test_what_a_reader_gets(
    messages: list[dict[str, Any]],
    ends: bytes | type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "SECONDS", 0.1)

    async def work(transfers: Transfers) -> None:
        inbox = Inbox(Client(messages), 100, transfers)  # type: ignore[arg-type]

        def read() -> bytes:
            data, buffer = b"", memoryview(bytearray(2))
            while count := inbox.readinto(buffer):
                data += buffer[:count]
            return data

        if isinstance(ends, bytes):
            assert await transfers.run(read) == ends
        else:
            with pytest.raises(ends):
                await transfers.run(read)

    on_a_loop(work)


def test_a_reader_ends_with_the_server() -> None:
    async def work(transfers: Transfers) -> None:
        inbox = Inbox(Client([]), 100, transfers)  # type: ignore[arg-type]
        reading = transfers.run(lambda: inbox.readinto(memoryview(bytearray(2))))
        while not transfers.waiting:
            await asyncio.sleep(0)
        await transfers.close()
        with pytest.raises(Stopping):
            await reading

    on_a_loop(work)


def test_a_body_that_trickles_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece comes in time, and all of it never would."""
    monkeypatch.setattr(streams, "SECONDS", 0.05)

    class Trickle(Client):
        async def receive(self) -> dict[str, Any]:
            await asyncio.sleep(0.02)
            return piece(b"x")

    async def work(transfers: Transfers) -> None:
        inbox = Inbox(Trickle([]), 1 << 30, transfers)  # type: ignore[arg-type]

        def read() -> None:
            while inbox.readinto(memoryview(bytearray(10))):
                pass

        with pytest.raises(TooSlow, match="more slowly"):
            await transfers.run(read)

    on_a_loop(work)


def test_places_are_for_all_and_for_each() -> None:
    async def work(transfers: Transfers) -> None:
        for tenant in ("a", "a", "b", "c"):
            transfers.take(tenant)
        for tenant in ("a", "d"):
            with pytest.raises(Busy):
                transfers.take(tenant)
        transfers.give_back("b")
        with pytest.raises(Busy):
            transfers.take("a")
        transfers.take("d")

    on_a_loop(work)
