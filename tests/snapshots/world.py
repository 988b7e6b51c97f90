"""Stores to export from and import into."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvdb
from kvdb.match import Namespace
from kvdb.store import Store
from tests.support import MIXED, PLAIN, open_namespace, put_all, random_tokens


@contextmanager
def pair(folder: Path, **options: Any) -> Iterator[tuple[Store, Store]]:
    """Two stores, as on two machines."""
    with kvdb.open(folder / "a", **options) as a, kvdb.open(folder / "b", **options) as b:
        yield a, b


def fill(store: Store) -> list[Namespace]:
    """Two namespaces, a chain of 100 tokens in each, named; the one of seed 0 is plain."""
    namespaces = []
    for seed, layout in enumerate((PLAIN, MIXED)):
        namespace = open_namespace(store, layout)
        tokens = random_tokens(seed, 100)
        put_all(store, namespace, tokens)
        tip = store.match(namespace, tokens).tip_hash
        store.sequence(namespace, tip, name=f"agent {seed}")
        namespaces.append(namespace)
    return namespaces


def blocks(store: Store) -> set[str]:
    """Hashes of the live blocks."""
    rows = store.sql("SELECT lower(hex(hash)) FROM blocks WHERE state = 'live'", limit=100_000).rows
    return {row[0] for row in rows}


def snapshot_of(store: Store, **options: Any) -> bytes:
    target = io.BytesIO()
    store.export_snapshot(target, **options)
    return target.getvalue()
