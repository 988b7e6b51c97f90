"""Whoever may choose salts makes no more rows than there may be."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvdb.clock import Environment
from kvdb.history import RequestRecord
from kvdb.match import Namespace
from kvdb.opening import Options, open_store
from kvdb.store import Store
from tests.support import check_prefix, open_namespace, put_all, random_tokens

MOST = 200
TOTALS = "SELECT sum(requests), sum(prompt_tokens), sum(restored_tokens) FROM "


def salted(store: Store, number: int) -> Namespace:
    return open_namespace(store, salt=number.to_bytes(4, "little"))


def ids(store: Store) -> set[int]:
    return {namespace.id for namespace in store.namespaces()}


def test_namespaces_that_hold_nothing_go_when_there_are_many(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdb.vacant.MOST_NAMESPACES", MOST)
    clock = [time.time_ns() // 1000]
    environment = Environment(now_us=lambda: clock[0])
    options = Options(min_free_bytes=0)
    with open_store(path, options, environment=environment) as store:
        full, named, handle = (salted(store, number) for number in range(3))
        tokens = random_tokens(1, 40)
        put_all(store, full, tokens)
        store.sequence(named, None, name="empty")
        last = 0
        for number in range(3, MOST + 20):
            clock[0] += 1_000_000
            last = salted(store, number).id
            if number % 10 == 0:
                store.record(RequestRecord(clock[0], last, 10, 0, 0, 10, 1, "none"))
                store.flush()
        assert MOST // 2 <= len(ids(store)) < MOST * 0.6
        assert {full.id, named.id, handle.id, last} <= ids(store)
        assert check_prefix(store, full, tokens) == len(tokens)
        put_all(store, handle, tokens)
        assert check_prefix(store, handle, tokens) == len(tokens)
        for table in ("request_totals", "hourly_totals"):
            assert store.sql(TOTALS + table).rows == [(21, 210, 0)]
        nobody = "SELECT count(*) FROM requests WHERE namespace_id IS NULL"
        assert 0 < store.sql(nobody).rows[0][0] < 21
        assert store.sql("SELECT requests FROM savings WHERE namespace_id IS NULL").rows[0][0] > 0
        # The same salt is a key space again, under a number of its own.
        assert salted(store, 5).id > last
        assert store.verify(data=True).problems == []
