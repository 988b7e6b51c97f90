"""Questions about the store: SQL that reads, and why a prompt did not hit. For the admin key."""

from __future__ import annotations

import threading
from typing import Any

from fastapi import Request
from pydantic import Field

from engine.events import Request as EngineRequest
from engine.http.admin import Body, service_of, store_of
from engine.http.errors import RETRY_SECONDS, route_class
from engine.http.levels import Router
from engine.http.openai_shapes import openai_error
from engine.http.prompts import PromptFields, RowId, prompt_of
from engine.prompt.tokenizer import namespace_decoder
from kvdb.errors import Busy, UsageError
from kvdb.explain import Explanation, explain_request, explain_tokens
from kvdb.sandbox import Parameters, SqlResult, run_in_child

router = Router(
    "administration", prefix="/v1/kvdb", tags=["Questions"], route_class=route_class(openai_error)
)

MAX_ROWS = 10_000
MAX_SECONDS = 60.0
# Each statement is a process of its own.
SQL_PLACES = 2
SQL_WAIT_SECONDS = 5.0


class SqlBody(Body):
    sql: str
    params: dict[str, str | int | float | None] = Field(default_factory=dict)
    limit: int = Field(1000, ge=0, le=MAX_ROWS)
    timeout: float = Field(10.0, gt=0, le=MAX_SECONDS)


@router.post("/sql")
def sql(body: SqlBody, request: Request) -> dict[str, Any]:
    """Run one SELECT, in a process of its own that is killed when its time is over. Blobs are hex;
    ``capped`` says whether there were more rows."""
    result = in_child(request, body.sql, body.params, body.limit, body.timeout)
    rows = [[_plain(value) for value in row] for row in result.rows]
    return {"columns": list(result.columns), "rows": rows, "capped": result.capped}


def in_child(
    request: Request, text: str, params: Parameters, limit: int, timeout: float
) -> SqlResult:
    """Run a statement in a child, one of a few at a time. Raises Busy, QueryError."""
    places: threading.Semaphore = request.app.state.sql_places
    if not places.acquire(timeout=SQL_WAIT_SECONDS):
        raise Busy(f"{SQL_PLACES} statements run already: try again later.", RETRY_SECONDS)
    try:
        return run_in_child(store_of(request).path, text, params, limit=limit, deadline=timeout)
    finally:
        places.release()


def _plain(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


class ExplainBody(PromptFields):
    """A prompt of a model, or the id of a past request."""

    model: str = ""
    request_id: RowId | None = None


@router.post("/explain")
def explain(body: ExplainBody, request: Request) -> dict[str, Any]:
    """Say how much of a prompt would hit now, or of a past request did; where it stops, and why."""
    given = prompt_of(body)
    if given is None and body.request_id is not None:
        return _explain_past(request, body.request_id).as_dict()
    if given is not None and body.request_id is None:
        return _explain_prompt(request, body.model, given).as_dict()
    raise UsageError("Give request_id, or one of messages, prompt and tokens.")


def _explain_past(request: Request, request_id: int) -> Explanation:
    store = store_of(request)
    rows = store.sql("SELECT namespace_id FROM requests WHERE id = ?", (request_id,)).rows
    text = None
    if rows and rows[0][0] is not None:
        text = namespace_decoder(store, rows[0][0])
    return explain_request(store, request_id, text)


def _explain_prompt(request: Request, model: str, given: EngineRequest) -> Explanation:
    """Against the key space that the served model uses; it is loaded if it is not in memory."""
    service, store = service_of(request), store_of(request)
    with service.pool.engine(service.find(model).name) as engine:
        storage, prompt = engine.call(lambda worker: (worker.storage, worker.encode(given)))
    if storage is None:
        raise UsageError("The state of this model is not stored.")
    decode = None if prompt.tokenizer is None else prompt.tokenizer.decode
    return explain_tokens(
        store, storage.namespace, prompt.tokens, segments=prompt.segments(), text=decode
    )
