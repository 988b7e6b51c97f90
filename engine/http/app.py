"""The ASGI app: dialects, one line each, behind access control."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.http import (
    admin,
    anthropic_messages,
    asking,
    caches,
    health,
    jobs,
    keys,
    metrics,
    openai_chat,
    openai_completions,
    openai_models,
    openai_responses,
    overview,
    pages,
    snapshots,
)
from engine.http.errors import error_response, problem_of
from engine.http.openai_shapes import openai_error
from engine.http.service import Service
from engine.http.streams import Transfers

Access = Callable[[ASGIApp], ASGIApp]

ROUTERS: tuple[APIRouter, ...] = (
    openai_models.router,
    openai_chat.router,
    openai_completions.router,
    openai_responses.router,
    anthropic_messages.router,
    caches.router,
    snapshots.caches_router,
    health.router,
    metrics.router,
    admin.router,
    jobs.router,
    snapshots.router,
    asking.router,
    keys.router,
    overview.router,
    pages.router,
)


@asynccontextmanager
async def _life(app: FastAPI) -> AsyncGenerator[None]:
    yield
    await app.state.transfers.close()
    await asyncio.to_thread(app.state.jobs.close)  # the store is about to close
    await app.state.figures.close()


def create_app(service: Service, access: Access | None = None) -> FastAPI:
    """The app that serves ``service``. ``access`` is wrapped around all of it, and says who asks in
    ``request.state.caller``; without it everybody may do everything."""
    app = FastAPI(
        title="kvdb",
        version=version("kvdb"),
        summary="A database of KV cache state for local LLM inference",
        lifespan=_life,
    )
    app.state.service = service
    app.state.metrics = metrics.Metrics(service)
    app.state.jobs = jobs.Jobs()
    app.state.transfers = Transfers()
    app.state.figures = overview.StoreFigures(service.store)
    app.state.sql_places = threading.Semaphore(asking.SQL_PLACES)
    for router in ROUTERS:
        app.include_router(router)

    async def say(_request: Request, error: Exception) -> Response:
        return error_response(problem_of(error), openai_error)

    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, say)
    if access is not None:
        app.add_middleware(access)
    return app
