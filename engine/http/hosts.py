"""The Host header against DNS rebinding, and whose pages may call.

A page of some site can make a browser send requests to this machine. By DNS rebinding it even reads
the answers, but then the Host header names that site. A request that another site's page sends as
such names it in its Origin header.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.http.refusal import refuse

HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?", re.ASCII)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only. A name other than
    localhost counts as not: what it means is decided elsewhere."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


class HostCheck:
    """Lets a request through whose one Host header names this server: by a name it knows, or by an
    address, which no rebinding can bring about."""

    def __init__(self, app: ASGIApp, bind: str, names: Iterable[str]) -> None:
        self._app = app
        self._local = is_loopback(bind)
        self._names = {"localhost", *(name.lower().strip("[]") for name in (bind, *names))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._known(Headers(scope=scope).getlist("host")):
            text = "The Host header does not name this server; serve.allowed_hosts adds names."
            await refuse(scope, send, 403, "unknown_host", text)
            return
        await self._app(scope, receive, send)

    def _known(self, values: list[str]) -> bool:
        match = HOST.fullmatch(values[0]) if len(values) == 1 else None
        if match is None:
            return False
        name = match["name"].lower().strip("[]").removesuffix(".")
        if name in self._names:
            return True
        address = _address(name)
        return address is not None and (address.is_loopback or not self._local)


def is_foreign(headers: Headers, allowed: Iterable[str]) -> bool:
    """Whether a page of another site sent a request, that is not ``allowed`` to."""
    origin = headers.get("origin")
    if origin is None or origin in allowed:
        return False
    return origin.partition("://")[2].lower() != headers.get("host", "").lower()
