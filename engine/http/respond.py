"""A turn as an HTTP response: at once, or as a stream that a dialect's writer words."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.responses import Response

from engine.events import Progress
from engine.http.errors import Problem, json_bytes, problem_of
from engine.http.sse import KEEP_ALIVE, EventStream, progress_comment
from engine.http.turn import Answer, Piece, Turn
from engine.http.usage import Usage

Whole = Callable[[Sequence[Answer], Usage], Mapping[str, Any]]


class Writer(Protocol):
    """Frames of one stream, in a dialect."""

    def start(self) -> bytes: ...
    def piece(self, piece: Piece) -> bytes: ...
    def end(self, usage: Usage) -> bytes: ...
    def error(self, problem: Problem) -> bytes: ...


def json_response(document: Mapping[str, Any]) -> Response:
    return Response(json_bytes(document), media_type="application/json")


async def respond_at_once(turn: Turn, whole: Whole) -> Response:
    """The turn's answers, when they have ended, as ``whole`` words them."""
    try:
        answers = await turn.answers()
        return json_response(whole(answers, turn.usage()))
    finally:
        turn.close()


async def take_all(turn: Turn, take: Callable[[Piece], object]) -> Usage:
    """Hand all pieces of the turn to ``take`` as they come, and close it."""
    try:
        while not turn.ended:
            for piece in await turn.pieces():
                take(piece)
        return turn.usage()
    finally:
        turn.close()


async def respond_as_stream(
    turn: Turn, writer: Writer, keep_alive: float, ping: bytes = b""
) -> Response:
    """A stream of the turn's pieces. What is wrong with the request is raised while nothing is
    sent; what comes later is a frame. ``ping``: see :func:`frames`."""
    try:
        await turn.begun(keep_alive)
    except BaseException:
        turn.close()
        raise
    return EventStream(frames(turn, writer, keep_alive, ping))


async def frames(
    turn: Turn, writer: Writer, keep_alive: float, ping: bytes = b""
) -> AsyncGenerator[bytes]:
    """A turn's stream, closed at its end. ``ping`` is an event that says that the stream is alive,
    for clients that do not count comments."""
    try:
        if first := writer.start():
            yield first
        while not turn.ended:
            pieces = await turn.pieces(keep_alive)
            body = b"".join(
                progress_comment(piece) + ping
                if isinstance(piece, Progress)
                else writer.piece(piece)
                for piece in pieces
            )
            if body or not pieces:
                yield body or ping or KEEP_ALIVE
        if last := writer.end(turn.usage()):
            yield last
    except Exception as error:  # the border: a stream that began can only say it in a frame
        yield writer.error(problem_of(error))
    finally:
        turn.close()
