"""Bodies: read whole before anything looks at them, within a size, a time and a depth."""

from __future__ import annotations

import asyncio
import re

import numpy as np
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.http.errors import Gone, TooLarge, TooSlow
from engine.http.refusal import refuse
from kvdb.errors import UsageError

STRIDE = 1 << 16
LENGTH = re.compile(r"[0-9]{1,20}", re.ASCII)
BRACKETS = b"[]{}"
# A snapshot is read as it comes, by its own limits (engine/http/streams.py).
STREAMED = re.compile(r"/v1/kvdb/(?:caches/[^/]+/)?import")
NO_BRACKETS = bytes(byte for byte in range(256) if byte not in BRACKETS)


def nesting(body: bytes) -> int:
    """How deep JSON is nested, as far as it is JSON; never recurses."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(plain.split(b'"')[::2])
    brackets = outside.translate(None, NO_BRACKETS)
    depth = deepest = 0
    for start in range(0, len(brackets), STRIDE):
        some = np.frombuffer(brackets[start : start + STRIDE], dtype=np.uint8)
        # [ and {, made equal by one bit, are one less than 0x7C, and ] and } one more.
        levels = np.cumsum(0x7C - (some | 0x20).astype(np.int32), dtype=np.int32)
        deepest = max(deepest, depth + int(levels.max()))
        depth += int(levels[-1])
    return deepest


def check_nesting(body: bytes, most: int) -> None:
    """Raise UsageError for JSON that is nested deeper than ``most``, or is not in UTF-8."""
    if b"\0" in body:
        raise UsageError("The body must be JSON in UTF-8.")
    if body.count(b"[") + body.count(b"{") > most and nesting(body) > most:
        raise UsageError(f"The body is nested deeper than {most} levels.")


class BodyLimits:
    """Reads each body and hands it on as one piece. What is too large by its own word is refused
    before it is read."""

    def __init__(self, app: ASGIApp, most: int, seconds: float, depth: int) -> None:
        self._app, self._most, self._seconds, self._depth = app, most, seconds, depth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        length, chunked = headers.get("content-length"), "transfer-encoding" in headers
        if length is None and not chunked:
            await self._app(scope, receive, send)
            return
        if length is not None and (chunked or not LENGTH.fullmatch(length)):
            # Two servers may read it in two ways.
            text = "A request has one Content-Length, a number, or a Transfer-Encoding."
            await refuse(scope, send, 400, "unclear_length", text)
            return
        if STREAMED.fullmatch(scope["path"].removeprefix(scope.get("root_path", ""))):
            await self._app(scope, receive, _closing(send))
            return
        try:
            body = await self._read(receive, length)
            if _is_json(headers):
                check_nesting(body, self._depth)
        except TooLarge as error:
            await refuse(scope, send, 413, "too_large", str(error))
        except TooSlow as error:
            await refuse(scope, send, 408, "too_slow", str(error))
        except UsageError as error:
            await refuse(scope, send, 400, "invalid_json", str(error))
        except Gone:
            return
        else:
            await self._app(scope, _again(body, receive), send)

    async def _read(self, receive: Receive, length: str | None) -> bytes:
        if length is not None and int(length) > self._most:
            raise TooLarge(f"The body is larger than {self._most} bytes.")
        pieces, size, more = [], 0, True
        try:
            async with asyncio.timeout(self._seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone("The client has gone.")
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > self._most:
                        raise TooLarge(f"The body is larger than {self._most} bytes.")
                    more = message.get("more_body", False)
        except TimeoutError as error:
            raise TooSlow(f"The body did not come within {self._seconds:g} s.") from error
        return b"".join(pieces)


def _is_json(headers: Headers) -> bool:
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    return kind.endswith("json")


def _again(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body once, then what the server says."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _closing(send: Send) -> Send:
    """A ``send`` after whose answer the connection is closed: what of the body was not read would
    be waited for."""

    async def close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return close
