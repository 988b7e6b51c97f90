"""What went wrong, as an HTTP status and one sentence. Each dialect gives it its own shape."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from engine.engine import EngineClosed
from engine.pool import ModelBusy
from kvdb.errors import (
    Busy,
    KvdbError,
    OutOfMemory,
    OutOfSpace,
    PromptError,
    QueryError,
    QuotaExceeded,
    SnapshotRejected,
    StoreClosed,
    StoreLocked,
    StoreMissing,
    StoreReadOnly,
    StoreUnavailable,
    UsageError,
)

log = logging.getLogger("kvdb.http")


class Stopping(KvdbError):
    """The server is being shut down."""


class TooLate(KvdbError):
    """A request's time was over before its answer began."""


class NotServed(KvdbError):
    """There is nothing of that name here."""


class Forbidden(KvdbError):
    """The caller may not do that."""


class TooLarge(KvdbError):
    """A request is larger than this server takes."""


class TooSlow(KvdbError):
    """A body did not come in time."""


class Gone(KvdbError):
    """The client went away before all of its body or answer had passed."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a dialect turns into its own error: ``code`` is a short name, ``param`` the field that
    is to blame."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


Shape = Callable[[Problem], Mapping[str, Any]]

# The first class that fits decides.
STATUSES: tuple[tuple[type[BaseException], int, str], ...] = (
    (SnapshotRejected, 400, "invalid_snapshot"),
    (QuotaExceeded, 400, "quota_exceeded"),
    (Stopping, 503, "stopping"),
    (EngineClosed, 503, "stopping"),
    (ModelBusy, 503, "model_busy"),
    (Busy, 429, "too_many_requests"),
    (OutOfMemory, 503, "out_of_memory"),
    (StoreMissing, 404, "not_found"),
    (StoreReadOnly, 503, "no_store"),
    (StoreLocked, 503, "no_store"),
    (StoreUnavailable, 503, "no_store"),
    (StoreClosed, 503, "no_store"),
    (OutOfSpace, 503, "out_of_space"),
    (TooLate, 408, "deadline"),
    (TooSlow, 408, "too_slow"),
    (Gone, 400, "gone"),
    (NotServed, 404, "not_found"),
    (Forbidden, 403, "forbidden"),
    (TooLarge, 413, "too_large"),
    (PromptError, 400, "invalid_prompt"),
    (QueryError, 400, "invalid_query"),
    (UsageError, 400, "invalid_value"),
)
RETRY_SECONDS = 5
MOST_RETRY_SECONDS = 60


def problem_of(error: BaseException) -> Problem:
    """An error in words; what is no KvdbError is logged, and says no more than its class."""
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return Problem(error.status_code, f"{error.detail}.".replace("..", "."), "http_error")
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            retry = getattr(error, "retry_seconds", RETRY_SECONDS if status == 503 else None)
            after = None if retry is None else min(MOST_RETRY_SECONDS, max(1, math.ceil(retry)))
            return Problem(status, str(error), code, retry_after=after)
    if isinstance(error, KvdbError):
        return Problem(500, str(error), "server_error")
    log.error("a request failed: %s", type(error).__name__, exc_info=error)
    return Problem(500, f"The request failed: {type(error).__name__}.", "server_error")


def _invalid(error: RequestValidationError) -> Problem:
    """The first complaint of pydantic, as a sentence."""
    first: Mapping[str, Any] = next(iter(error.errors()), {})
    where = ".".join(str(part) for part in first.get("loc", ()) if part != "body")
    if first.get("type") == "json_invalid":
        return Problem(400, "The body is not JSON.", "invalid_json")
    message = str(first.get("msg", "the request is invalid")).rstrip(".")
    text = f"{where}: {message}." if where else f"The body is wrong: {message}."
    return Problem(400, text, "invalid_value", where or None)


def json_bytes(document: object) -> bytes:
    """Compact JSON in ASCII, so that half a surrogate pair in it breaks nothing."""
    return json.dumps(document, separators=(",", ":")).encode()


def error_response(problem: Problem, shape: Shape) -> Response:
    return Response(
        json_bytes(shape(problem)),
        problem.status,
        media_type="application/json",
        headers=problem.headers,
    )


def route_class(shape: Shape) -> type[APIRoute]:
    """A route whose errors have ``shape``."""

    class DialectRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                try:
                    return await handle(request)
                except Exception as error:  # the border: it becomes the dialect's words
                    return error_response(problem_of(error), shape)

            return guarded

    return DialectRoute
