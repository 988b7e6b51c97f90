"""Keys over HTTP, for the admin key."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.http.admin import Body, store_of
from engine.http.errors import route_class
from engine.http.levels import Router
from engine.http.openai_shapes import openai_error
from engine.http.prompts import RowId
from kvdb.keys import Key, Role, create_key, list_keys, revoke_key

router = Router(
    "administration", prefix="/v1/kvdb/keys", tags=["Keys"], route_class=route_class(openai_error)
)


class KeyBody(Body):
    role: Role
    tenant: str = ""
    name: str = ""
    shared: bool = False


@router.get("")
def list_(request: Request) -> dict[str, Any]:
    """All keys, revoked ones too; none is shown itself."""
    return {"keys": [_shown(key) for key in list_keys(store_of(request))]}


@router.post("", status_code=201)
def create(body: KeyBody, request: Request, response: Response) -> dict[str, Any]:
    """Make a key. ``key`` is what its owner sends; it is shown this once."""
    new = create_key(
        store_of(request), body.role, tenant=body.tenant, name=body.name, shared=body.shared
    )
    response.headers["cache-control"] = "no-store"
    return {"key": new.text, **_shown(new.key)}


@router.delete("/{key_id}")
def revoke(key_id: RowId, request: Request) -> dict[str, Any]:
    """End a key at once and for good."""
    return _shown(revoke_key(store_of(request), key_id))


def _shown(key: Key) -> dict[str, Any]:
    shown = asdict(key)
    del shown["cache_salt"]
    return {**shown, "shared": key.role == "tenant" and not key.cache_salt}
