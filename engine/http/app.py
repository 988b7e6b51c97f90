"""The ASGI app: dialects, one line each, behind access control."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.http import (
    anthropic_messages,
    openai_chat,
    openai_completions,
    openai_models,
    openai_responses,
)
from engine.http.errors import error_response, problem_of
from engine.http.openai_shapes import openai_error
from engine.http.service import Service

Access = Callable[[ASGIApp], ASGIApp]

ROUTERS: tuple[APIRouter, ...] = (
    openai_models.router,
    openai_chat.router,
    openai_completions.router,
    openai_responses.router,
    anthropic_messages.router,
)


def create_app(service: Service, access: Access | None = None) -> FastAPI:
    """The app that serves ``service``. ``access`` is wrapped around all of it, and says who asks in
    ``request.state.caller``; without it everybody may do everything."""
    app = FastAPI(
        title="kvdb",
        version=version("kvdb"),
        summary="A database of KV cache state for local LLM inference",
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)

    async def say(_request: Request, error: Exception) -> Response:
        return error_response(problem_of(error), openai_error)

    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, say)
    if access is not None:
        app.add_middleware(access)
    return app
