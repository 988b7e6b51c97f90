"""kvdb: a SQLite-indexed database of KV state for local LLM inference.

``kvdb.open(path)`` gives a :class:`~kvdb.store.Store`. Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdb.check.rebuild import rebuild_store as rebuild
    from kvdb.history import RequestRecord
    from kvdb.identity import ExtraKey, ModelIdentity
    from kvdb.layout import LayerSpec, Layout, TensorSpec
    from kvdb.match import Match, Namespace
    from kvdb.opening import Options
    from kvdb.opening import migrate_store as migrate
    from kvdb.store import Store
    from kvdb.writer import Payload, Ticket

__version__ = "0.1.0"

_PUBLIC = {
    "ExtraKey": "kvdb.identity",
    "LayerSpec": "kvdb.layout",
    "Layout": "kvdb.layout",
    "Match": "kvdb.match",
    "ModelIdentity": "kvdb.identity",
    "Namespace": "kvdb.match",
    "Options": "kvdb.opening",
    "Payload": "kvdb.writer",
    "RequestRecord": "kvdb.history",
    "Store": "kvdb.store",
    "TensorSpec": "kvdb.layout",
    "Ticket": "kvdb.writer",
}

__all__ = [
    "ExtraKey",
    "LayerSpec",
    "Layout",
    "Match",
    "ModelIdentity",
    "Namespace",
    "Options",
    "Payload",
    "RequestRecord",
    "Store",
    "TensorSpec",
    "Ticket",
    "__version__",
    "migrate",
    "open",
    "rebuild",
]


def open(path: str | os.PathLike[str], **options: Any) -> Store:
    """Open or create the store at ``path``; ``options`` are the fields of
    :class:`kvdb.opening.Options`. See :func:`kvdb.opening.open_store` for what it raises."""
    from kvdb.opening import Options, open_store

    return open_store(path, Options(**options))


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name == "rebuild":
        return importlib.import_module("kvdb.check.rebuild").rebuild_store
    if name == "migrate":
        return importlib.import_module("kvdb.opening").migrate_store
    raise AttributeError(f"module 'kvdb' has no attribute {name!r}")
