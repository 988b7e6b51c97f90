"""The pages for people: files as they are. They hold no figures, so anybody may have them; what
they show they ask for with the key of who looks.

A browser runs and loads nothing here that does not come from this server.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import NamedTuple

from fastapi import HTTPException
from starlette.responses import Response

from engine.http.levels import Router

router = Router("open", include_in_schema=False)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class File(NamedTuple):
    package: str
    name: str
    media_type: str


HTML, CSS, SCRIPT = "text/html", "text/css", "text/javascript"
FILES = {
    "report.css": File("kvdb.report", "page.css", CSS),  # what both pages about a store look like
    "style.css": File("engine.http.pages", "style.css", CSS),
    "icon.svg": File("engine.http.pages", "icon.svg", "image/svg+xml"),
    "common.js": File("engine.http.pages", "common.js", SCRIPT),
    "bars.js": File("engine.http.pages", "bars.js", SCRIPT),
    "index.js": File("engine.http.pages", "index.js", SCRIPT),
    "chat.js": File("engine.http.pages", "chat.js", SCRIPT),
}


# Agents knock with HEAD before they ask anything.
@router.api_route("/", methods=["GET", "HEAD"])
async def index() -> Response:
    """What the server does, and what its store saves."""
    return _response(File("engine.http.pages", "index.html", HTML))


@router.get("/chat")
async def chat() -> Response:
    """Talk to a model, and see what the store did for each turn."""
    return _response(File("engine.http.pages", "chat.html", HTML))


@router.get("/pages/{name}")
async def part(name: str) -> Response:
    """What the pages are made of."""
    if name not in FILES:
        raise HTTPException(404, "There is nothing here")
    return _response(FILES[name])


def _response(file: File) -> Response:
    return Response(_read(file), media_type=file.media_type, headers=HEADERS)


@cache
def _read(file: File) -> bytes:
    return (resources.files(file.package) / file.name).read_bytes()
