"""Ad-hoc SQL: what it may do, and hostile statements it must refuse or stop."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvdb import driver, functions, sandbox
from kvdb.errors import QueryError
from kvdb.sandbox import SqlResult

sqlite = driver.sqlite3


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain database made from the migrations, with 50 blocks of one chain."""
    path = tmp_path_factory.mktemp("template") / "index.sqlite"
    connection = sqlite.connect(path)
    for _, text in driver.migration_files():
        connection.executescript(text)
    connection.execute(
        "INSERT INTO namespaces (id, fingerprint, model, identity, layout, block_tokens, salt, "
        "created_at, used_at) VALUES (1, ?, 'Tiny_Model', '{}', '{}', 256, x'', 0, 0)",
        (bytes(32),),
    )
    connection.executemany(
        "INSERT INTO blocks VALUES (?, ?, ?, 1, ?, 256, 1, 'live', 'cold', 'prefill', 1, NULL, "
        "0, 0, 0, 0)",
        [(n, n.to_bytes(32), n - 1 or None, n - 1) for n in range(1, 51)],
    )
    connection.commit()
    connection.close()
    return path


@pytest.fixture
def index(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(template, tmp_path))


@pytest.fixture
def ask(index: Path) -> Iterator[Any]:
    connections = []

    def run(sql: str, params: sandbox.Parameters = (), **limits: Any) -> SqlResult:
        connection = driver.connect(index, read_only=True)
        connections.append(connection)
        return sandbox.run_sql(connection, sql, params, **limits)

    yield run
    for connection in connections:
        connection.close()


def test_returns_columns_and_rows(ask: Any) -> None:
    result = ask("SELECT id, depth AS level FROM blocks WHERE id <= :top ORDER BY id", {"top": 2})
    assert result == SqlResult(("id", "level"), [(1, 0), (2, 1)], capped=False)


@pytest.mark.parametrize(("limit", "capped"), [(49, True), (50, False), (51, False), (0, True)])
def test_says_when_rows_were_left_out(ask: Any, limit: int, capped: bool) -> None:
    result = ask("SELECT id FROM blocks", limit=limit)
    assert (len(result.rows), result.capped) == (min(limit, 50), capped)


def test_every_view_of_the_store_can_be_read(ask: Any) -> None:
    views = ask("SELECT name FROM sqlite_schema WHERE type = 'view'").rows
    assert len(views) >= 9
    for (view,) in views:
        ask(f"SELECT * FROM {view}")  # noqa: S608 - a name from the schema
    assert len(ask("SELECT * FROM prefix_tree").rows) == 50


HOSTILE = {
    "write": "DELETE FROM blocks",
    "insert with returning": "INSERT INTO counters VALUES ('x', 1) RETURNING name",
    "attach": "ATTACH DATABASE 'evil.db' AS evil",
    "copy": "VACUUM INTO 'copy.db'",
    "temp table": "CREATE TEMP TABLE t AS SELECT * FROM blocks",
    "pragma": "PRAGMA query_only = OFF",
    "table-valued pragma": "SELECT * FROM pragma_table_info('blocks')",
    "begin": "BEGIN",
    "two statements": "SELECT 1; DROP TABLE blocks",
    "commit behind a comment": "SELECT 1 /* */; COMMIT -- x",
    "extension": "SELECT load_extension('./evil')",
    "random blob": "SELECT length(randomblob(500000000))",
    "zero blob": "SELECT zeroblob(500000000)",
    "wide printf": "SELECT printf('%.*c', 500000000, 'x')",
    "quoted printf": "SELECT \"PRINTF\"('%.*c', 500000000, 'x')",
    "printf under a view's name": (
        "WITH prefix_tree AS (SELECT printf('%.*c', 500000000, 'x')) SELECT * FROM prefix_tree"
    ),
    "format": "SELECT format('%.*c', 500000000, 'x')",
    "replace": "SELECT replace('aaaa', 'a', 'aaaaaaaaaaaa')",
    "like bomb": "WITH RECURSIVE t(n, x) AS (SELECT 0, 'aa' UNION ALL SELECT n + 1, x || x FROM t "
    "WHERE n < 21) SELECT x LIKE '%' || substr(x, 1, 40000) || 'b' FROM t",
    "like bomb with escape": "WITH RECURSIVE t(n, x) AS (SELECT 0, 'aa' UNION ALL SELECT n + 1, "
    "x || x FROM t WHERE n < 21) SELECT x LIKE substr(x, 1, 40000) ESCAPE '!' FROM t",
    "glob": "SELECT 'aaaa' GLOB '*a*a*a*b'",
    "byte order mark": "\ufeffDELETE FROM blocks",
    "empty": "",
    "comment only": "-- nothing",
    "syntax": "SELEC 1",
    "no such table": "SELECT * FROM nowhere",
    "missing parameter": "SELECT :x",
    "nul": "SELECT 1\0; DELETE FROM blocks",
    "explain of a write": "EXPLAIN DELETE FROM blocks",
    "deep expression": "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "long": "SELECT 1 " + " " * 200_000,
}


@pytest.mark.parametrize("sql", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_statements_are_refused(
    ask: Any, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = index.read_bytes()
    started = time.monotonic()
    with pytest.raises(QueryError) as caught:
        ask(sql, deadline=1.0)
    assert time.monotonic() - started < 1.5
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    assert index.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} <= {
        "index.sqlite",
        "index.sqlite-wal",
        "index.sqlite-shm",
    }


@pytest.mark.parametrize(
    "sql",
    [
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t",
        "SELECT count(*) FROM blocks a, blocks b, blocks c, blocks d, blocks e",
    ],
)
def test_endless_statements_stop_at_the_deadline(ask: Any, sql: str) -> None:
    started = time.monotonic()
    with pytest.raises(QueryError, match=r"stopped after 0\.3 seconds"):
        ask(sql, deadline=0.3)
    assert time.monotonic() - started < 0.8


def test_a_large_result_is_refused(ask: Any) -> None:
    with pytest.raises(QueryError, match="longer than 16 MiB"):
        ask(
            "WITH RECURSIVE t(n, x) AS (SELECT 0, 'ab' UNION ALL SELECT n + 1, x || x FROM t "
            "WHERE n < 26) SELECT x FROM t"
        )


def test_the_message_names_the_function(ask: Any) -> None:
    with pytest.raises(QueryError, match=r"zeroblob\(\) is not available"):
        ask("SELECT zeroblob(9)")


@given(
    st.text(alphabet="aAbB%_é!\n", max_size=12),
    st.text(alphabet="aAbBé%_!\n", max_size=24),
    st.booleans(),
)
@example("!", "", True)
def test_like_agrees_with_sqlite(pattern: str, text: str, escaped: bool) -> None:
    """The replacement is quicker on hostile input, and otherwise the same."""
    plain = sqlite.connect(":memory:")
    try:
        sql = "SELECT ? LIKE ?" + (" ESCAPE '!'" if escaped else "")
        (expected,) = plain.execute(sql, (text, pattern)).fetchone()
    finally:
        plain.close()
    assert int(functions.like(pattern, text, "!" if escaped else None)) == expected
