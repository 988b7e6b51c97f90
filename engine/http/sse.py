"""Server-sent events: frames, keep-alive comments, prefill progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from starlette.responses import Response

from engine.events import Progress
from engine.http.errors import json_bytes

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
STALLED_SECONDS = 60.0


def frame(document: Mapping[str, object], event: str | None = None) -> bytes:
    """One event of a stream."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + json_bytes(document) + b"\n\n"


def progress_comment(progress: Progress) -> bytes:
    """How far the prompt is, for who looks at the stream: clients skip comments."""
    return f": Processing {_short(progress.done)}/{_short(progress.total)}\n\n".encode()


def _short(tokens: int) -> str:
    return str(tokens) if tokens < 1000 else f"{tokens // 1000}K"


class EventStream(Response):
    """A stream of ready frames, which ends with its generator. Unlike starlette's it needs no task
    beside each stream: a turn watches for itself whether its client is there."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes]) -> None:
        self._frames = frames
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames) as frames:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # A client that reads nothing would keep its answer in memory for ever. Without an end
            # to the body, the connection is closed.
            with suppress(TimeoutError):
                async for body in frames:
                    async with asyncio.timeout(STALLED_SECONDS):
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
