"""``/health``: is the server alive, and does it take requests? Answered on the event loop alone: no
store, no engine and no thread can hold it up."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse

from engine.http.levels import Router
from engine.http.service import Service

router = Router("open", tags=["Health"])


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """Alive, and ready or not; 503 where it is not, as it is while it ends."""
    service: Service = request.app.state.service
    ready = not service.stopping
    return JSONResponse({"live": True, "ready": ready}, 200 if ready else 503)


@router.get("/health/live")
async def live() -> JSONResponse:
    """Alive, whatever else."""
    return JSONResponse({"live": True})


@router.get("/health/ready")
async def ready(request: Request) -> JSONResponse:
    """As /health."""
    return await health(request)
