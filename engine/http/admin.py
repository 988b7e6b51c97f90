"""Administration: models in memory, prompts made ready, room made. For the admin key."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict

from engine.http.errors import route_class
from engine.http.levels import Router
from engine.http.openai_shapes import openai_error
from engine.http.prompts import PromptFields, RowId, prompt_of
from engine.http.service import Service
from engine.sequences import warm
from kvdb.errors import StoreUnavailable, UsageError
from kvdb.store import Store

router = Router(
    "administration",
    prefix="/v1/kvdb",
    tags=["Administration"],
    route_class=route_class(openai_error),
)


class Body(BaseModel):
    """A body of ours: what it has that nobody knows is an error, as in settings."""

    model_config = ConfigDict(extra="forbid")


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def store_of(request: Request) -> Store:
    """The store that is served. Raises StoreUnavailable where there is none."""
    store = service_of(request).store
    if store is None:
        raise StoreUnavailable("This server runs without a store; see what it said at its start.")
    return store


class ModelBody(Body):
    model: str


class PinBody(ModelBody):
    pinned: bool = True


# These are plain functions: they wait, so each runs in a thread of the server's pool.
@router.get("/models")
def list_models(request: Request) -> dict[str, Any]:
    """The models that may be loaded, and which are in memory."""
    service = service_of(request)
    loaded = {state.name: state for state in service.pool.loaded()}
    rows: list[dict[str, Any]] = []
    for name, served in service.models.items():
        state = loaded.get(name)
        memory = {} if state is None else asdict(state)
        rows.append({"name": name, "aliases": served.aliases, "loaded": bool(memory), **memory})
    return {"models": rows}


@router.post("/models/load")
def load_model(body: ModelBody, request: Request) -> dict[str, Any]:
    """Bring a model into memory; others that are idle make room."""
    service = service_of(request)
    with service.pool.engine(service.find(body.model).name):
        return list_models(request)


@router.post("/models/unload")
def unload_model(body: ModelBody, request: Request) -> dict[str, Any]:
    """Take a model that is idle out of memory; ``unloaded`` says whether it was."""
    service = service_of(request)
    unloaded = service.pool.unload(service.find(body.model).name)
    return {"unloaded": unloaded, **list_models(request)}


@router.post("/models/pin")
def pin_model(body: PinBody, request: Request) -> dict[str, Any]:
    """Keep a model in memory, loading it if need be; or let it go again."""
    service = service_of(request)
    service.pool.pin(service.find(body.model).name, body.pinned)
    return list_models(request)


class WarmBody(PromptFields):
    """A prompt, or the name of a cache."""

    cache: str | None = None


@router.post("/warm")
def warm_prompt(body: WarmBody, request: Request) -> dict[str, Any]:
    """Make a prompt or a named cache ready: computed, verified, in RAM as far as it has room."""
    service, store = service_of(request), store_of(request)
    items = [item for item in (body.cache, prompt_of(body)) if item is not None]
    if len(items) != 1:
        raise UsageError("Give one of cache, messages, prompt and tokens.")
    with service.pool.engine(service.find(body.model).name) as engine:
        return asdict(warm(engine, store, items[0]))


class EvictBody(Body):
    """Evict until the store takes at most ``to_bytes``, of one namespace or of all; a namespace
    alone goes whole."""

    to_bytes: RowId | None = None
    namespace_id: RowId | None = None
    dry_run: bool = False


@router.post("/evict")
def evict(body: EvictBody, request: Request) -> dict[str, Any]:
    """Remove blocks that nobody holds, least useful first."""
    if body.to_bytes is None and body.namespace_id is None:
        raise UsageError("Say how far to go: to_bytes, namespace_id, or both.")
    report = store_of(request).evict(
        to_bytes=body.to_bytes or 0, namespace_id=body.namespace_id, dry_run=body.dry_run
    )
    return asdict(report)
