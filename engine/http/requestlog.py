"""A name for every request, and one line of JSON about it: no prompt, no query, no key."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.http.caller import Caller
from engine.http.levels import Rules

log = logging.getLogger("kvdb.http.requests")

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
OVERVIEW = "/v1/kvdb/overview"
NAMES = (b"x-request-id", b"request-id")
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)


@contextmanager
def request_lines(stream: TextIO) -> Iterator[None]:
    """Inside, the lines go to ``stream``, and nowhere else."""
    handler = logging.StreamHandler(stream)
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


class RequestLog:
    """Sets ``request.state.request_id``, to the client's ``x-request-id`` if that is one, and says
    it in the answer: in ``x-request-id``, and in ``request-id`` as Anthropic's clients read it."""

    def __init__(
        self,
        app: ASGIApp,
        rules: Rules,
        *,
        seconds: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._app, self._rules, self._new_id = app, rules, new_id
        self._seconds, self._now = seconds, now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else self._new_id()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status, nbytes, began = 0, 0, self._seconds()

        async def note(message: Message) -> None:
            nonlocal status, nbytes
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [h for h in message.get("headers", ()) if h[0].lower() not in NAMES]
                message = {
                    **message,
                    "headers": own + [(name, request_id.encode()) for name in NAMES],
                }
            elif message["type"] == "http.response.body":
                nbytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            rule = self._rules.find(scope)
            caller = state.get("caller")
            line = {
                "at": datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds"),
                "request_id": request_id,
                # These may hold anything; a route's template holds nothing of the client's.
                "method": scope["method"] if scope["method"] in METHODS else None,
                "route": None if rule is None else rule.template,
                "status": status or None,
                "ms": round((self._seconds() - began) * 1000, 1),
                "bytes": nbytes,
                "key_id": caller.key_id if isinstance(caller, Caller) else None,
                "tenant": caller.tenant if isinstance(caller, Caller) else None,
            }
            # Probes ask for health every second or so, and a page that is open more often.
            polled = rule is not None and (rule.level == "open" or rule.template == OVERVIEW)
            quiet = polled and 200 <= status < 300
            log.log(logging.DEBUG if quiet else logging.INFO, "%s", json.dumps(line))
