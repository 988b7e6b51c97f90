"""``/health``: is the server alive, and does it take requests? Answered on the event loop alone: no
store, no engine and no thread can hold it up."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse

from engine.http.levels import Router
from engine.http.service import Service

router = Router("open", tags=["Health"])


@router.get("/health")
async def health(request: Request) -> dict[str, bool]:
    """Alive; and whether it takes requests."""
    return {"live": True, "ready": _ready(request)}


@router.get("/health/live")
async def live() -> dict[str, bool]:
    """Alive, whatever else."""
    return {"live": True}


@router.get("/health/ready")
async def ready(request: Request) -> JSONResponse:
    """503 before the first model is in memory, and from the moment that the server is to end."""
    ready = _ready(request)
    return JSONResponse({"ready": ready}, 200 if ready else 503)


def _ready(request: Request) -> bool:
    service: Service = request.app.state.service
    return service.ready and not service.stopping
