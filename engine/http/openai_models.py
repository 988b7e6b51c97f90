"""``/v1/models``: what is served."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from engine.http.errors import route_class
from engine.http.levels import Router
from engine.http.openai_shapes import openai_error
from engine.http.service import Served, Service

router = Router("inference", prefix="/v1", tags=["OpenAI"], route_class=route_class(openai_error))


@router.get("/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The models that requests may name."""
    service: Service = request.app.state.service
    return {
        "object": "list",
        "data": [_model(service, model) for model in service.models.values()],
    }


@router.get("/models/{name:path}")
async def show_model(name: str, request: Request) -> dict[str, Any]:
    """One of them, also by an alias."""
    service: Service = request.app.state.service
    return _model(service, service.find(name))


def _model(service: Service, model: Served) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "kvdb",
    }
    facts = service.facts(model.name)
    if facts is not None and facts.context is not None:
        found["context_length"] = facts.context
    return found
