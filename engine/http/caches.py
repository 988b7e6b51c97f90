"""Named caches: state of a prompt that is kept under a name, in the caller's key space and quota.

A name is the caller's tenant's own. In the store it stands behind the tenant's, as ``tenant/name``,
so that tenants do not hear of each other's; without a tenant it is the name as it is, the same that
``kvdb sequences`` shows.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from typing import Any

from fastapi import Request
from pydantic import Field

from engine.events import End, Stats
from engine.events import Request as EngineRequest
from engine.http.admin import Body, service_of, store_of
from engine.http.caller import Wishes, caller_of, read_wishes
from engine.http.errors import Forbidden, Stopping, route_class
from engine.http.levels import Router
from engine.http.openai_shapes import openai_error
from engine.http.prompts import PromptFields, prompt_of
from engine.http.service import Served, Service
from engine.sequences import FLUSH_SECONDS, Prefix, prefix_of, warm
from kvdb.errors import OutOfSpace, StoreMissing, UsageError
from kvdb.sequences import NamedSequence, named_sequences
from kvdb.store import Store

router = Router(
    "inference", prefix="/v1/kvdb/caches", tags=["Caches"], route_class=route_class(openai_error)
)

NAME = re.compile(r"\w[\w .@+-]{0,127}")


class SaveBody(PromptFields):
    """A prompt, what to call its state, and for how long to keep it (None: until it is dropped)."""

    name: str
    ttl_seconds: float | None = Field(None, gt=0)


class ForkBody(Body):
    name: str
    ttl_seconds: float | None = Field(None, gt=0)


@router.post("", status_code=201)
async def save(body: SaveBody, request: Request) -> dict[str, Any]:
    """Compute what of a prompt is not stored, and keep its state under a name. Of a chat it is the
    state after its last message: whatever chat begins with these messages will hit."""
    service, store, owner = service_of(request), store_of(request), owner_of(request)
    name, served = stored_name(owner, body.name), service.find(body.model)
    given = prompt_of(
        body, tenant=owner.tenant, client=owner.client, salt=owner.salt, reuse=served.reuse
    )
    if given is None:
        raise UsageError("Give one of messages, prompt and tokens.")
    prefix = await asyncio.to_thread(_prepare, service, store, served, given, name)
    stats = await _fill(service, served, prefix.filling(given))
    await asyncio.to_thread(_hold, store, prefix, name, body.ttl_seconds, owner)
    computed = stats.computed_tokens + stats.refilled_tokens
    return {**_shown(owner, find(store, owner, body.name)), "computed_tokens": computed}


def _prepare(
    service: Service, store: Store, served: Served, given: EngineRequest, name: str
) -> Prefix:
    if store.sql("SELECT 1 FROM sequences WHERE name = ?", (name,)).rows:
        raise UsageError("There is a cache of that name already.")
    with service.pool.engine(served.name) as engine:
        return prefix_of(engine, store, given)


async def _fill(service: Service, served: Served, run: EngineRequest) -> Stats:
    """Have it computed, as any request is: it waits its turn, and is refused when too many do."""
    answering = service.open(served, run)
    try:
        while True:
            for event in await answering.events():
                if isinstance(event, End):
                    if event.reason == "cancelled":
                        raise Stopping("The server was shut down before all of it was computed.")
                    return event.stats
    finally:
        answering.cancel()


def _hold(
    store: Store, prefix: Prefix, name: str, ttl_seconds: float | None, owner: Wishes
) -> None:
    store.flush(FLUSH_SECONDS)
    try:
        store.sequence(
            prefix.namespace,
            prefix.tip_hash,
            name=name,
            ttl_seconds=ttl_seconds,
            tenant=owner.tenant,
        )
    except StoreMissing as error:
        raise OutOfSpace(
            "The prompt was computed, but there is no room for its state: in the tenant's quota, "
            "in the store, or on the disk."
        ) from error


# These are plain functions: they wait for the store, so each runs in a thread of the server's pool.
@router.get("")
def list_caches(request: Request) -> dict[str, Any]:
    """The caller's caches."""
    store, owner = store_of(request), owner_of(request)
    prefix = stored_name(owner, "")
    found = [one for one in named_sequences(store, owner.tenant) if _is_ours(prefix, one)]
    return {"caches": [_shown(owner, one) for one in found]}


@router.get("/{name}")
def show(name: str, request: Request) -> dict[str, Any]:
    """One of them."""
    owner = owner_of(request)
    return _shown(owner, find(store_of(request), owner, name))


@router.post("/{name}/load")
def load(name: str, request: Request) -> dict[str, Any]:
    """Make it ready: verified, and in RAM as far as that has room. Its model is loaded."""
    service, store, owner = service_of(request), store_of(request), owner_of(request)
    found = find(store, owner, name)
    with service.pool.engine(service.find(found.model).name) as engine:
        warmed = warm(engine, store, found.name, owner.salt)
    return {**asdict(warmed), "name": name}


@router.post("/{name}/fork", status_code=201)
def fork(name: str, body: ForkBody, request: Request) -> dict[str, Any]:
    """Let another name hold what this one holds; copies nothing."""
    store, owner = store_of(request), owner_of(request)
    sequence = store.find_sequence(find(store, owner, name).name)
    store.sequence(
        sequence.namespace,
        sequence.tip_hash,
        name=stored_name(owner, body.name),
        ttl_seconds=body.ttl_seconds,
        tenant=owner.tenant,
    )
    return _shown(owner, find(store, owner, body.name))


@router.delete("/{name}")
def drop(name: str, request: Request) -> dict[str, Any]:
    """Let it go. Its blocks stay until they are evicted."""
    store, owner = store_of(request), owner_of(request)
    found = find(store, owner, name)
    store.find_sequence(found.name).drop()
    return {**_shown(owner, found), "dropped": True}


def owner_of(request: Request) -> Wishes:
    """Whose caches the caller's are. Raises Forbidden for one that is let in without any key:
    names and what they hold are their owners'."""
    caller = caller_of(request)
    if caller.key_id is None and not caller.overview:
        raise Forbidden("Named caches need a key.")
    return read_wishes(request.headers, None, caller)


def stored_name(owner: Wishes, name: str) -> str:
    """A cache's name in the store; of "" the beginning that all of the owner's have. Raises
    UsageError."""
    if name and not NAME.fullmatch(name):
        raise UsageError(
            "A cache's name has letters, digits, spaces and . _ @ + -, at most 128 of them."
        )
    return f"{owner.tenant}/{name}" if owner.tenant else name


def _is_ours(prefix: str, one: NamedSequence) -> bool:
    return one.name.startswith(prefix) and NAME.fullmatch(one.name[len(prefix) :]) is not None


def find(store: Store, owner: Wishes, name: str) -> NamedSequence:
    """One of the owner's caches. Raises StoreMissing for what is not there, or is another's: the
    two are not told apart."""
    found = named_sequences(store, owner.tenant, stored_name(owner, name)) if name else []
    if not found:
        raise StoreMissing(f"There is no cache named {name!r}.")
    return found[0]


def _shown(owner: Wishes, one: NamedSequence) -> dict[str, Any]:
    return {**asdict(one), "name": one.name[len(stored_name(owner, "")) :]}
