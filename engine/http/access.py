"""Access: who asks, and whether they may. Pure ASGI, around any app.

From the outside in: a name and a log line for the request, the Host header, CORS, keys and levels,
and last, of callers that may ask, the body within its limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.http.bodies import BodyLimits
from engine.http.caller import Caller, tenant_salt
from engine.http.hosts import HOST, HostCheck, is_foreign, is_loopback
from engine.http.levels import Level, Rules
from engine.http.refusal import refuse
from engine.http.requestlog import RequestLog
from kvdb.errors import KvdbError, UsageError
from kvdb.keys import ANYBODY, Key, Keyring

if TYPE_CHECKING:
    from kvdb.store import Store

ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9.\[\]:_-]+", re.ASCII)
METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")
EXPOSED = ("x-request-id", "retry-after")
NEEDS_KEY = "This server needs a key: send it as Authorization: Bearer, or as x-api-key."
NEEDS_ADMIN = (
    "This needs the admin key; kvdb keys create admin makes one, and --no-auth asks for none on "
    "this machine."
)


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Where a server listens and whom it lets in. ``allowed_hosts`` are names it is called by
    beside localhost, ``cors_origins`` the sites whose pages may call it."""

    host: str = "127.0.0.1"
    port: int = 8000
    no_auth: bool = False
    allow_unauthenticated_inference: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    max_nesting: int = 64
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    max_connections: int = 512

    def __post_init__(self) -> None:
        if self.no_auth and not is_loopback(self.host):
            raise UsageError(
                f"--no-auth lets in whoever reaches the port, and so does not go with {self.host}: "
                "listen on 127.0.0.1, or make keys with kvdb keys create."
            )
        for origin in self.cors_origins:
            if not ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"{origin!r} is not an origin like https://example.com; name each one."
                )
        for name in self.allowed_hosts:
            if not HOST.fullmatch(name):
                raise UsageError(f"{name!r} is not the name of a host.")
        if min(self.max_body_bytes, self.max_nesting, self.max_connections) < 1:
            raise UsageError("The largest body, deepest nesting and most connections are above 0.")
        if not (self.header_seconds > 0 and self.body_seconds > 0):
            raise UsageError("The seconds that a client has must be above 0.")


def check_bind(options: AccessOptions, store: Store | None) -> None:
    """Raise UsageError, which says why, for a server that anybody could use from elsewhere."""
    if is_loopback(options.host) or options.allow_unauthenticated_inference:
        return
    if store is None or not Keyring(store).any():
        raise UsageError(
            f"Without a key only this machine is served, and {options.host} can be reached from "
            "others: make a key with kvdb keys create main, or listen on 127.0.0.1 "
            "(--allow-unauthenticated-inference lets everybody ask models)."
        )


def access_control(
    options: AccessOptions, store: Store | None, rules: Rules
) -> Callable[[ASGIApp], ASGIApp]:
    """What to put around an app, so that ``request.state.caller`` says who asks and nobody gets
    further than ``rules`` allow. Raises UsageError for what :func:`check_bind` refuses."""
    check_bind(options, store)
    keyring = None if store is None else Keyring(store)

    def around(app: ASGIApp) -> ASGIApp:
        inner: ASGIApp = BodyLimits(
            app, options.max_body_bytes, options.body_seconds, options.max_nesting
        )
        inner = KeyCheck(inner, options, keyring, rules)
        if options.cors_origins:
            inner = CORSMiddleware(
                inner, options.cors_origins, METHODS, ["*"], expose_headers=EXPOSED
            )
        inner = HostCheck(inner, options.host, options.allowed_hosts)
        return Front(app, RequestLog(inner, rules), keyring)

    return around


class Front:
    """Sends requests through what guards the app, and the server's start and stop past it. There
    are no websockets here."""

    def __init__(self, app: ASGIApp, guarded: ASGIApp, keyring: Keyring | None) -> None:
        self._app, self._guarded, self._keyring = app, guarded, keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._guarded(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            if self._keyring is not None:
                self._keyring.flush()
        else:
            await send({"type": "websocket.close", "code": 1008})


class KeyCheck:
    """Finds out who asks, and whether they may use this route.

    A key that kvdb did not make (clients want to send one) counts as none. Once any key was seen,
    one is needed until the server ends: revoking the last one opens nothing.
    """

    def __init__(
        self, app: ASGIApp, options: AccessOptions, keyring: Keyring | None, rules: Rules
    ) -> None:
        self._app, self._options, self._keyring, self._rules = app, options, keyring, rules
        self._keyed = not is_loopback(options.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        rule = self._rules.find(scope)
        level: Level = "administration" if rule is None else rule.level
        state = scope.setdefault("state", {})
        if level == "open":  # answers whatever becomes of the store
            state["caller"] = Caller(inference=False)
            await self._app(scope, receive, send)
            return
        try:
            caller = self._caller(headers)
        except KvdbError as error:
            await refuse(scope, send, 503, "no_store", f"Keys cannot be looked up now: {error}")
            return
        if isinstance(caller, str):
            await refuse(scope, send, 401, "invalid_api_key", caller)
            return
        if caller.key_id is None and is_foreign(headers, self._options.cors_origins):
            text = "Pages of other sites may not call this server; serve.cors_origins lets some."
            await refuse(scope, send, 403, "foreign_origin", text)
            return
        state["caller"] = caller
        if may(caller, level):
            await self._app(scope, receive, send)
        elif rule is None:
            text = "There is nothing here, or nothing for this key."
            await refuse(scope, send, 404, "not_found", text)
        else:
            await refuse(scope, send, 403, "not_allowed", NEEDS_ADMIN)

    def _caller(self, headers: Headers) -> Caller | str:
        """Who asks; or why that is nobody, in words. Raises KvdbError without a readable store."""
        if self._options.no_auth:
            return Caller(inference=True, overview=True, admin=True)
        ours = {text for text in given_keys(headers) if text.startswith("kvdb_")}
        if ours and self._keyring is not None:
            key = self._keyring.find(ours.pop())
            if key is None or ours:
                return "This key is not valid here: it is wrong, was revoked, or is one of two."
            return caller_with(key)
        if self._keyring is not None and not self._keyed:
            self._keyed = self._keyring.any()
        if not self._keyed:
            return Caller(inference=True, overview=True)
        if self._options.allow_unauthenticated_inference:
            return Caller(tenant=ANYBODY, inference=True, salt=tenant_salt(ANYBODY))
        return NEEDS_KEY


def given_keys(headers: Headers) -> list[str]:
    """The keys that a request brings, as bearer token and as x-api-key; never in its query, which
    ends up in logs and histories."""
    bearers = [value.split(" ", 1) for value in headers.getlist("authorization")]
    tokens = [parts[1].strip() for parts in bearers if parts[0].lower() == "bearer" and parts[1:]]
    return tokens + [value.strip() for value in headers.getlist("x-api-key")]


def caller_with(key: Key) -> Caller:
    """What a key lets its owner do."""
    return Caller(
        tenant=key.tenant,
        inference=True,
        overview=key.role != "tenant",
        admin=key.role == "admin",
        salt=key.cache_salt,
        key_id=key.id,
    )


def may(caller: Caller, level: Level) -> bool:
    """Whether a caller may use routes of a level."""
    return {
        "open": True,
        "inference": caller.inference,
        "overview": caller.overview,
        "administration": caller.admin,
    }[level]
