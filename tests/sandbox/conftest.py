"""Fixtures: a closed store with a few blocks, which children open."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvdb
from kvdb import RequestRecord
from tests.support import open_namespace, put_all, random_tokens


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five blocks of one chain and three requests."""
    path = tmp_path_factory.mktemp("sandbox") / "store"
    with kvdb.open(path, min_free_bytes=0) as store:
        namespace = open_namespace(store)
        put_all(store, namespace, random_tokens(1, 70))
        for number in range(3):
            store.record(RequestRecord(number, namespace.id, 70, 64, 0, 6, 1, "partial"))
    return path
