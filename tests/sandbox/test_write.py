"""What --write may change, and what it must refuse."""

from __future__ import annotations

import pytest

from kvdb import RequestRecord
from kvdb.errors import KvdbError, QueryError
from kvdb.sandbox.write import ROWS_PER_TRANSACTION, run_write
from kvdb.store import Store
from tests.support import open_namespace, put_all, random_tokens


@pytest.fixture
def full(store: Store) -> Store:
    namespace = open_namespace(store)
    put_all(store, namespace, random_tokens(1, 40))
    for number in range(5):
        store.record(
            RequestRecord(number, namespace.id, 1, 0, 0, 1, 0, "none", tenant="ab"[number % 2])
        )
    store.flush()
    return store


def state(store: Store) -> list[tuple[object, ...]]:
    """Every row of every table."""
    with store.database.read() as connection:
        names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        return [
            (name, *row)
            for (name,) in names
            for row in connection.execute(f'SELECT * FROM "{name}"')  # noqa: S608
        ]


def count(store: Store) -> int:
    return int(store.sql("SELECT count(*) FROM requests").rows[0][0])


@pytest.mark.parametrize(
    ("sql", "left"),
    [
        ("DELETE FROM requests", 0),
        ("delete from REQUESTS where tenant = :tenant -- only these", 2),
        ("DELETE FROM requests WHERE id IN (SELECT id FROM requests WHERE id < 3);", 3),
        ("WITH old AS (SELECT 1 AS id) DELETE FROM requests WHERE id IN old", 4),
        ("DELETE FROM requests WHERE tenant LIKE 'A%'", 2),
        ("DELETE FROM evictions", 5),
    ],
)
def test_history_can_be_deleted(full: Store, sql: str, left: int) -> None:
    result = run_write(full.database, sql, {"tenant": "a"})
    assert count(full) == left
    if "evictions" not in sql:
        assert result.rows == [(5 - left,)]


def test_deleted_rows_can_be_returned(full: Store) -> None:
    result = run_write(full.database, "DELETE FROM requests WHERE id <= 2 RETURNING id AS gone")
    assert (result.columns, result.rows) == (("gone",), [(1,), (2,)])


def test_a_long_deletion_is_many_short_transactions(full: Store) -> None:
    with full.database.write() as connection:
        connection.execute(
            "INSERT INTO requests (started_at, prompt_tokens, restored_tokens, refilled_tokens, "
            "computed_tokens, generated_tokens, skip) "
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2500) "
            "SELECT i, 0, 0, 0, 0, 0, 'none' FROM n"
        )
    turns = 0
    hold = full.database.write

    def counted(**options: bool):  # type: ignore[no-untyped-def]
        nonlocal turns
        turns += 1
        return hold(**options)

    full.database.write = counted  # type: ignore[method-assign]
    assert run_write(full.database, "DELETE FROM requests WHERE skip = 'none'").rows == [(2505,)]
    assert turns == 1 + 2505 // ROWS_PER_TRANSACTION + 1  # the first one only compiles it
    assert count(full) == 0


def test_a_long_deletion_deletes_what_it_says(full: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its condition holds for the rows as they were, and is a condition."""
    monkeypatch.setattr("kvdb.sandbox.write.ROWS_PER_TRANSACTION", 1)
    sql = "DELETE FROM requests WHERE id < (SELECT avg(id) FROM requests)"
    assert run_write(full.database, sql).rows == [(2,)]
    for wrong in ("id = 3) OR (1", "id = 3 UNION SELECT 4", "id = 3 LIMIT 5"):
        with pytest.raises(QueryError):
            run_write(full.database, "DELETE FROM requests WHERE " + wrong)  # noqa: S608
    assert count(full) == 3


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE settings SET value = '500' WHERE key = 'history_requests'",
        "INSERT OR REPLACE INTO settings VALUES ('history_requests', '500')",
        "INSERT INTO settings VALUES ('history_requests', '1') "
        "ON CONFLICT DO UPDATE SET value = '500'",
    ],
)
def test_a_setting_can_be_changed(full: Store, sql: str) -> None:
    run_write(full.database, sql)
    rows = full.sql("SELECT value FROM settings WHERE key = 'history_requests'").rows
    assert rows == [("500",)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("history_requests", "many"),
        ("history_requests", "-1"),
        ("history_requests", "1.5"),
        ("max_bytes", "10GB"),
        ("max_bytes", "1000"),
        ("quota.tenant.a", "lots"),
        ("histroy_requests", "5"),
        ("min_free_bytes", "99999999999999999999"),
        ("history_evictions", "٣"),
    ],
)
def test_a_bad_setting_is_refused_by_name(full: Store, key: str, value: str) -> None:
    before = state(full)
    with pytest.raises(KvdbError) as caught:
        run_write(
            full.database,
            "INSERT OR REPLACE INTO settings VALUES (:key, :value)",
            {"key": key, "value": value},
        )
    assert key in str(caught.value)
    assert str(caught.value).endswith(".")
    assert state(full) == before


REFUSED = [
    "DELETE FROM blocks",
    "DELETE FROM namespaces",
    "UPDATE requests SET tenant = 'x'",
    "INSERT INTO requests (id) VALUES (99)",
    "REPLACE INTO requests (id) VALUES (1)",
    "UPDATE counters SET value = 0",
    "DELETE FROM sqlite_schema",
    "DROP TABLE requests",
    "ALTER TABLE requests ADD COLUMN x",
    "CREATE TABLE x (y)",
    "CREATE TRIGGER t AFTER DELETE ON requests BEGIN DELETE FROM blocks; END",
    "CREATE TEMP TRIGGER t AFTER DELETE ON requests BEGIN DELETE FROM blocks; END",
    "ATTACH 'x' AS y",
    "VACUUM",
    "PRAGMA writable_schema = ON",
    "PRAGMA foreign_keys = OFF",
    "COMMIT",
    "ROLLBACK",
    "SAVEPOINT a",
    "DELETE FROM requests; DELETE FROM blocks",
    "DELETE FROM requests WHERE 1); DELETE FROM blocks WHERE (1",
    "DELETE FROM requests WHERE zeroblob(9) IS NOT NULL",
    "WITH requests AS (SELECT * FROM blocks) DELETE FROM blocks",
    "DELETE FROM requests WHERE (WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) "
    "SELECT count(*) FROM t)",
    "DELETE FROM requests WHERE",
    "DELETE FROM requests WHERE id = :id",
    "",
]


@pytest.mark.parametrize("sql", REFUSED)
def test_the_rest_is_refused(full: Store, sql: str) -> None:
    before = state(full)
    with pytest.raises(QueryError) as caught:
        run_write(full.database, sql)
    assert str(caught.value).endswith(".")
    assert state(full) == before
    put_all(full, open_namespace(full), random_tokens(2, 20))  # the connection is as it was
