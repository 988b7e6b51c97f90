"""Who asks, and what of it is in a request's headers or its body's ``kvdb`` field."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.events import Priority
from engine.http.errors import Forbidden
from kvdb.errors import UsageError

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_NAME = 64
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Header, key of the body's kvdb field.
NAMES = (
    ("x-kvdb-tenant", "tenant"),
    ("x-kvdb-priority", "priority"),
    ("x-kvdb-no-store", "no_store"),
    ("x-kvdb-ttl", "ttl"),
    ("x-kvdb-salt", "salt"),
    ("x-kvdb-request-id", "request_id"),
    ("x-kvdb-deadline-ms", "deadline_ms"),
    ("x-kvdb-approximate", "approximate"),
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as access found it. A tenant's key speaks for its tenant only, and gives its state
    a ``salt``; the main key (no tenant) may name one. ``overview`` lets it see the figures of all
    tenants."""

    tenant: str = ""
    inference: bool = True
    overview: bool = False
    admin: bool = False
    salt: bytes = b""
    key_id: int | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """How the caller wants one request treated."""

    tenant: str = ""
    priority: Priority = "interactive"
    store: bool = True
    ttl_seconds: float | None = None
    salt: bytes = b""
    request_id: str | None = None
    deadline_ms: float | None = None
    approximate: bool = False
    client: str = ""


def caller_of(request: Request) -> Caller:
    """Who asks. Without access control everybody is the machine's own user."""
    caller = getattr(request.state, "caller", None)
    return caller if isinstance(caller, Caller) else Caller(overview=True, admin=True)


def read_wishes(
    headers: Mapping[str, str], body: Mapping[str, Any] | None, caller: Caller
) -> Wishes:
    """The wishes in headers and in the body's ``kvdb`` field, which wins. Raises UsageError in one
    sentence, Forbidden for another tenant's name."""
    given: dict[str, object] = {key: headers[name] for name, key in NAMES if name in headers}
    if body:
        known = {key for _, key in NAMES}
        if unknown := sorted(body.keys() - known):
            raise UsageError(f"kvdb.{unknown[0]} is not known; known: {', '.join(sorted(known))}.")
        given |= {key: value for key, value in body.items() if value is not None}
    tenant = _name("tenant", given.get("tenant", caller.tenant))
    if tenant != caller.tenant and (caller.tenant or not caller.overview):
        raise Forbidden("Only the main key may speak for a tenant; others for their own.")
    priority = given.get("priority", "interactive")
    if priority not in ("interactive", "batch"):
        raise UsageError("priority must be 'interactive' or 'batch'.")
    request_id = given.get("request_id")
    return Wishes(
        tenant=tenant,
        priority=priority,
        store=not _flag("no_store", given.get("no_store", False)),
        ttl_seconds=_number("ttl", given.get("ttl")),
        salt=_salt(caller, tenant, _text("salt", given.get("salt", ""))),
        request_id=None if request_id is None else _name("request_id", request_id),
        deadline_ms=_number("deadline_ms", given.get("deadline_ms")),
        approximate=_flag("approximate", given.get("approximate", False)),
        client=headers.get("user-agent", "")[:MAX_NAME],
    )


def _salt(caller: Caller, tenant: str, own: str) -> bytes:
    """The key space: the caller's, or that of the tenant it names, and in it one of its own."""
    salt = caller.salt
    if tenant and not caller.tenant:
        salt = tenant_salt(tenant)
    if not own:
        return salt
    digest = hashlib.sha256(b"kvdb/request-salt/1\0" + len(salt).to_bytes(8, "little") + salt)
    digest.update(own.encode("utf-8", "surrogatepass"))
    return digest.digest()


def tenant_salt(tenant: str) -> bytes:
    """The salt that keeps a tenant's state invisible to others."""
    return hashlib.sha256(b"kvdb/tenant/1\0" + tenant.encode("utf-8", "surrogatepass")).digest()


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be text.")
    return value


def _name(name: str, value: object) -> str:
    text = _text(name, value)
    if len(text) > MAX_NAME or not text.isprintable():
        raise UsageError(f"{name} must be at most {MAX_NAME} printable characters.")
    return text


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in TRUE + FALSE:
        raise UsageError(f"{name} must be true or false.")
    return text in TRUE


def _number(name: str, value: object) -> float | None:
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number) or number <= 0:
        raise UsageError(f"{name} must be a number above 0.")
    return number
