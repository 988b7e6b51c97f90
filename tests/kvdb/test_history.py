"""History: kept totals tell what the rows told, also when the rows are gone."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdb
from kvdb import driver
from kvdb.errors import UsageError
from kvdb.history import RequestRecord, insert_request, trim_history
from kvdb.opening import DEFAULT_SETTINGS
from kvdb.store import Store
from tests.support import BLOCK, open_namespace, put_all, random_tokens, shard_files

HOUR_US = 3600 * 1_000_000
START_US = 1_790_000_000 * 1_000_000 // HOUR_US * HOUR_US
COUNTS = st.integers(0, 1 << 40)
TIMES = st.floats(0, 1e7)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    restored, refilled, computed = draw(COUNTS), draw(st.integers(0, 20)), draw(COUNTS)
    return RequestRecord(
        started_at=START_US + draw(st.integers(0, 60 * HOUR_US)),
        namespace_id=draw(st.sampled_from((None, 1, 2))),
        prompt_tokens=restored + refilled + computed,
        restored_tokens=restored,
        refilled_tokens=refilled,
        computed_tokens=computed,
        generated_tokens=draw(COUNTS),
        skip=draw(st.sampled_from(("full", "partial", "none"))),
        tenant=draw(st.sampled_from(("", "a", "b"))),
        miss_reason=draw(st.sampled_from((None, "diverged", "evicted"))),
        restore_ms=draw(st.none() | TIMES),
        prefill_ms=draw(st.none() | TIMES),
    )


def fresh_index() -> driver.Connection:
    connection = driver.sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript("".join(text for _, text in driver.migration_files()))
    connection.executemany(
        "INSERT INTO namespaces (id, fingerprint, model, identity, layout, block_tokens, salt, "
        "created_at, used_at) VALUES (?, ?, ?, '{}', '{}', 256, x'', 0, 0)",
        [(1, bytes(32), "one"), (2, bytes([2] * 32), "two")],
    )
    connection.executemany("INSERT INTO settings VALUES (?, ?)", list(DEFAULT_SETTINGS.items()))
    return connection


def grouped(rows: list[RequestRecord], key: Any) -> dict[Any, list[RequestRecord]]:
    groups: dict[Any, list[RequestRecord]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def ratio(rows: list[RequestRecord]) -> Any:
    prompt = sum(row.prompt_tokens for row in rows)
    restored = sum(row.restored_tokens for row in rows)
    return pytest.approx(restored / prompt, abs=1e-4) if prompt else None


def saved(rows: list[RequestRecord]) -> float | None:
    timed = [
        row
        for row in rows
        if row.computed_tokens + row.refilled_tokens >= 16 and (row.prefill_ms or 0) > 0
    ]
    if not timed:
        return None
    tokens = sum(row.computed_tokens + row.refilled_tokens for row in timed)
    speed = sum(row.prefill_ms or 0 for row in timed) / tokens
    restored = sum(row.restored_tokens for row in rows)
    return (restored * speed - sum(row.restore_ms or 0 for row in rows)) / 1000


@settings(max_examples=40, deadline=None)
@given(st.lists(records(), max_size=12))
def test_views_of_kept_totals_tell_what_the_rows_told(rows: list[RequestRecord]) -> None:
    connection = fresh_index()

    def ask(sql: str) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = connection.execute(sql).fetchall()
        return found

    for row in rows:
        insert_request(connection, row)
    for trimmed in (False, True):
        if trimmed:
            trim_history(connection, 0)
            assert ask("SELECT count(*) FROM requests") == [(0,)]
        tenants = ask("SELECT tenant, requests, prompt_tokens, hit_ratio FROM tenant_usage")
        assert tenants == [
            (tenant, len(group), sum(row.prompt_tokens for row in group), ratio(group))
            for tenant, group in sorted(grouped(rows, lambda row: row.tenant).items())
        ]
        found = ask("SELECT coalesce(namespace_id, 0), requests, seconds_saved FROM savings")
        groups = sorted(grouped(rows, lambda row: row.namespace_id or 0).items())
        assert [row[:2] for row in found] == [(id_, len(group)) for id_, group in groups]
        for (_, _, seconds), (_, group) in zip(found, groups, strict=True):
            expected = saved(group)
            assert seconds == (
                None if expected is None else pytest.approx(expected, rel=1e-6, abs=2e-3)
            )
        misses = grouped([row for row in rows if row.miss_reason], lambda row: row.miss_reason)
        assert dict(ask("SELECT miss_reason, sum(requests) FROM miss_reasons GROUP BY 1")) == {
            reason: len(group) for reason, group in misses.items()
        }
        hours = ask("SELECT hour, requests, full_skips, hit_ratio FROM hourly_hits")
        by_hour = sorted(grouped(rows, lambda row: row.started_at // HOUR_US).items())
        assert hours == (
            []
            if trimmed
            else [
                (
                    f"{datetime.fromtimestamp(hour * 3600, UTC):%Y-%m-%d %H:00}",
                    len(group),
                    sum(row.skip == "full" for row in group),
                    ratio(group),
                )
                for hour, group in by_hour
            ]
        )
    connection.close()


def test_every_documented_view_runs_in_the_sandbox(store: Store) -> None:
    put_all(store, open_namespace(store), random_tokens(1, 3 * BLOCK))
    store.record(RequestRecord(START_US, None, 0, 0, 0, 0, 0, "none"))
    store.flush()
    views = store.sql("SELECT name FROM sqlite_schema WHERE type = 'view'").rows
    assert len(views) == 12
    for (view,) in views:
        store.sql(f"SELECT * FROM {view}")  # noqa: S608 - names of our own views
    (row,) = store.sql("SELECT hit_percent, ttft_ms, model FROM hit_history").rows
    assert row == (None, None, None)


def test_the_tree_view_gives_each_block_its_place(store: Store) -> None:
    namespace = open_namespace(store)
    prompt = random_tokens(1, 3 * BLOCK)
    fork = prompt.copy()
    fork[BLOCK] += 1
    for tokens in (prompt, fork[: 2 * BLOCK + 3]):
        put_all(store, namespace, tokens)
    rows = store.sql("SELECT * FROM prefix_tree ORDER BY path").rows
    assert [row[2:5] for row in rows] == [
        (0, 0, BLOCK),
        (1, BLOCK, BLOCK),
        (2, 2 * BLOCK, BLOCK),
        (1, BLOCK, BLOCK),
        (2, 2 * BLOCK, 3),
    ]
    hashes = {path: hash_ for _, path, _, _, _, hash_, *_ in rows}
    for _, path, _, _, _, _, parent, *_ in rows:
        assert hashes.get(path.rpartition("/")[0]) == parent


def test_what_is_written_and_what_goes_is_counted_by_day(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(1, 12 * BLOCK)
    for block in range(12):  # a shard each, for compaction to join
        put_all(store, namespace, tokens[: (block + 1) * BLOCK])
    written = sum(file.stat().st_size for file in shard_files(store.path))
    assert store.sql("SELECT sum(shards), sum(nbytes) FROM daily_wear").rows == [(12, written)]
    report = store.compact()
    assert report.shards_written == 1
    after = written + sum(file.stat().st_size for file in shard_files(store.path))
    assert store.sql("SELECT sum(nbytes) FROM daily_wear").rows == [(after,)]
    (live,) = store.sql("SELECT sum(live_bytes) FROM capacity").rows
    store.evict(to_bytes=0)
    assert store.sql("SELECT reason, evictions, tokens, nbytes FROM daily_evictions").rows == [
        ("manual", 12, 12 * BLOCK, *live)
    ]


def test_rebuild_keeps_totals_and_does_not_count_twice(path: Path) -> None:
    query = "SELECT * FROM request_totals, (SELECT sum(nbytes) FROM daily_wear)"
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        put_all(store, namespace, random_tokens(1, BLOCK))
        for id_ in (namespace.id, None):
            store.record(RequestRecord(START_US, id_, 30, 10, 0, 20, 4, "partial", prefill_ms=2.0))
        store.flush()
        with store.database.write() as connection:
            connection.execute("DELETE FROM requests WHERE namespace_id IS NULL")
        before = store.sql(query).rows
        hours = store.sql("SELECT * FROM hourly_totals").rows
    kvdb.rebuild(path)
    with kvdb.open(path) as store:
        assert store.sql(query).rows == before
        assert store.sql("SELECT * FROM hourly_totals").rows == hours


def test_how_much_history_is_kept_is_a_setting(path: Path) -> None:
    for wrong in (-1, 1 << 63):
        with pytest.raises(UsageError, match="whole numbers"):
            kvdb.open(path, history_requests=wrong)
    kvdb.open(path, history_requests=3, history_hours=2).close()
    with kvdb.open(path) as store:
        for hour in range(6):
            store.record(RequestRecord(START_US + hour * HOUR_US, None, 1, 0, 0, 1, 0, "none"))
            store.flush()
        assert store.sql("SELECT count(*) FROM requests").rows == [(3,)]
        assert store.sql("SELECT count(*) FROM hourly_hits").rows == [(2,)]
        assert store.sql("SELECT requests FROM tenant_usage").rows == [(6,)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("history_requests", "many"),
        ("history_hours", "-1"),
        ("history_evictions", ""),
        ("min_free_bytes", "1e9"),
        ("max_bytes", "5"),
        ("max_bytes", "9" * 40),
    ],
)
def test_a_setting_that_would_harm_is_refused_by_the_index_itself(
    store: Store, key: str, value: str
) -> None:
    with store.database.write() as connection:
        for statement in (
            "INSERT OR REPLACE INTO settings (key, value) VALUES (?1, ?2)",
            "UPDATE settings SET key = ?1, value = ?2 WHERE key = 'history_requests'",
        ):
            with pytest.raises(driver.sqlite3.IntegrityError):
                connection.execute(statement, (key, value))
        connection.execute("INSERT INTO settings VALUES ('note', 'many')")
        connection.execute("UPDATE settings SET value = '0' WHERE key = 'history_hours'")


def test_a_request_costs_less_than_a_millisecond() -> None:
    """Of the writer's time; the request itself only queues its record."""
    import time

    connection = fresh_index()
    record = RequestRecord(
        START_US, 1, 30, 10, 0, 20, 4, "partial", miss_reason="diverged", prefill_ms=2.0
    )
    times = []
    for _ in range(300):
        began = time.perf_counter()
        insert_request(connection, record)
        times.append(time.perf_counter() - began)
    connection.close()
    assert sorted(times)[150] < 1e-3
