"""Named caches as files, for whom they belong to; all of the store, for the admin key.

A snapshot that comes in is not believed (kvdb/snapshot/importing.py); but state can be computed
wrongly and signed well, and whoever meets it gets wrong answers. So a tenant's key brings state
into the tenant's own key space only, that of one served model, where it counts in its quota; and
into a key space that several share only the admin key does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request
from starlette.responses import Response

from engine.http.admin import service_of, store_of
from engine.http.asking import MAX_SECONDS, in_child
from engine.http.caches import find, owner_of, stored_name
from engine.http.caller import Wishes, caller_of
from engine.http.errors import Forbidden, TooLarge, route_class
from engine.http.levels import Router
from engine.http.openai_shapes import openai_error
from engine.http.streams import Inbox, Outbox, SnapshotStream, Transfers
from kvdb.encryption import Lock
from kvdb.errors import UsageError
from kvdb.snapshot.export import ExportReport
from kvdb.snapshot.importing import ImportReport, Terms
from kvdb.snapshot.selection import ids_where
from kvdb.store import Store

caches_router = Router(
    "inference", prefix="/v1/kvdb/caches", tags=["Caches"], route_class=route_class(openai_error)
)
router = Router(
    "administration", prefix="/v1/kvdb", tags=["Snapshots"], route_class=route_class(openai_error)
)

MAX_BLOCKS = 1_000_000
Recipients = Annotated[list[str], Query(default_factory=list, max_length=8)]
Bytes = Annotated[int, Query(ge=0, lt=1 << 62)]


@caches_router.get("/{name}/export")
async def export_cache(
    name: str, request: Request, encrypt: Recipients, codec: str | None = None
) -> Response:
    """A snapshot of what a cache holds: a tar file, as kvdb export writes it. ``codec`` encodes
    parts anew, ``encrypt`` is an age recipient."""
    store, owner = store_of(request), owner_of(request)
    found = await asyncio.to_thread(find, store, owner, name)
    export = partial(store.export_snapshot, sequences=[found.name], codec=codec)
    return await _send(request, export, encrypt, name)


@caches_router.post("/{name}/import", status_code=201)
async def import_cache(name: str, model: str, request: Request) -> dict[str, Any]:
    """Take a snapshot of one cache (the body) of a served model, and keep it under a name."""
    service, store, owner = service_of(request), store_of(request), owner_of(request)
    caller = caller_of(request)
    if not caller.admin and not (caller.tenant and owner.salt):
        raise Forbidden("State from elsewhere takes a tenant's own key, or the admin key.")
    served, stored = service.find(model), stored_name(owner, name)

    def take(inbox: Inbox) -> ImportReport:
        if store.sql("SELECT 1 FROM sequences WHERE name = ?", (stored,)).rows:
            raise UsageError("There is a cache of that name already.")
        with service.pool.engine(served.name) as engine:
            space = engine.call(lambda worker: worker.storage_for(owner.salt, owner.tenant))
        if space is None:
            raise UsageError("The state of this model is not stored.")
        terms = Terms(frozenset({space.namespace.fingerprint}), stored, owner.tenant)
        report = store.import_snapshot(inbox, name=f"over HTTP: {stored}", terms=terms)
        if report.sequences_left:
            raise UsageError(f"The state is here, but has no name: {report.sequences_left[0][1]}")
        return report

    report = await _receive(request, store, take)
    return _shown(owner, name, report)


@router.get("/export")
async def export_store(
    request: Request,
    encrypt: Recipients,
    where: str | None = None,
    model: str | None = None,
    codec: str | None = None,
    max_bytes: Bytes | None = None,
) -> Response:
    """A snapshot of all of the store, or of the blocks of which an SQL condition on block_usage
    holds, which a process of its own finds; with all that they stand on."""
    store = store_of(request)
    ids = None
    if where is not None:
        run = partial(in_child, request, params={}, limit=MAX_BLOCKS, timeout=MAX_SECONDS)
        ids = await asyncio.to_thread(ids_where, where, run)
    export = partial(store.export_snapshot, ids=ids, model=model, codec=codec, max_bytes=max_bytes)
    return await _send(request, export, encrypt, "store")


@router.post("/import")
async def import_store(request: Request) -> dict[str, Any]:
    """Take a snapshot, as kvdb import does."""
    store = store_of(request)

    def take(inbox: Inbox) -> ImportReport:
        return store.import_snapshot(inbox, name="over HTTP")

    report = await _receive(request, store, take)
    return asdict(report)


async def _send(
    request: Request,
    export: Callable[..., ExportReport],
    recipients: list[str],
    name: str,
) -> Response:
    lock = Lock(recipients) if recipients else None
    transfers, tenant = transfers_of(request), caller_of(request).tenant
    transfers.take(tenant)
    try:
        outbox = Outbox(transfers, lambda target: export(target, lock=lock))
        first = await outbox.begun()
    except BaseException:
        transfers.give_back(tenant)
        raise
    suffix = ".kvdb.age" if lock else ".kvdb"
    file = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)
    return SnapshotStream(outbox.pieces(first), file + suffix, partial(transfers.give_back, tenant))


async def _receive(
    request: Request, store: Store, take: Callable[[Inbox], ImportReport]
) -> ImportReport:
    transfers, tenant = transfers_of(request), caller_of(request).tenant
    most = store.limit.max_bytes
    if int(request.headers.get("content-length", 0)) > most:
        raise TooLarge(f"The snapshot is larger than the store may be, {most} bytes.")
    transfers.take(tenant)
    try:
        inbox = Inbox(request, most, transfers)
        return await transfers.run(lambda: take(inbox))
    finally:
        transfers.give_back(tenant)


def _shown(owner: Wishes, name: str, report: ImportReport) -> dict[str, Any]:
    return {
        "name": name,
        "blocks": report.blocks,
        "new": report.new,
        "present": report.present,
        "incompatible": dict(report.incompatible),
        "stored": report.stored,
        "digest": report.digest,
    }


def transfers_of(request: Request) -> Transfers:
    transfers: Transfers = request.app.state.transfers
    return transfers
