"""A store of schema 1 is migrated when it is opened, and keeps everything."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3 as independent  # noqa: TID251 - another library looks at the files
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvdb
from kvdb import driver
from kvdb.errors import StoreLocked, StoreUnavailable
from kvdb.locks import FileLock
from kvdb.opening import share_store
from tests.support import BLOCK, check_prefix, open_namespace, put_all, random_tokens

GOLDEN = Path(__file__).parents[1] / "golden" / "schema_1.zip"
TOKENS = random_tokens(1, 3 * BLOCK)
# Dies by its own hand before the given statement of the migration.
DIE = """
import os, signal, sys
import kvdb
from kvdb import driver

apply = driver.apply_migrations

def dying(connection):
    left = [int(sys.argv[2])]
    def trace(statement):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    connection.set_trace_callback(trace)
    return apply(connection)

driver.apply_migrations = dying
kvdb.open(sys.argv[1]).close()
"""


@pytest.fixture
def old(path: Path) -> Path:
    """A store as the program of schema 1 left it; see tests/golden/make_store.py."""
    shutil.unpack_archive(GOLDEN, path)
    return path


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def contents(file: Path) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of the tables of schema 1, in its columns."""
    first = independent.connect(":memory:")
    first.executescript(driver.migration_files()[0][1])
    tables = [
        name
        for (name,) in first.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        )
    ]
    found = {}
    connection = independent.connect(f"{file.as_uri()}?mode=ro", uri=True)
    for table in tables:
        columns = [row[1] for row in first.execute(f"PRAGMA table_info({table})")]
        found[table] = connection.execute(
            f"SELECT {', '.join(columns)} FROM {table} ORDER BY 1, 2"  # noqa: S608 - our own names
        ).fetchall()
    version = connection.execute("PRAGMA user_version").fetchall()
    connection.close()
    return {"version": version, **found}


def check(path: Path, before: dict[str, list[tuple[Any, ...]]]) -> None:
    """Opened, everything of before is there, is counted, and works."""
    kvdb.open(path).close()
    after = contents(path / "index.sqlite")
    assert after.pop("version") == [(driver.latest_version(),)]
    assert dict(after.pop("settings")) == {**dict(before["settings"]), "history_hours": "2208"}
    assert dict(after.pop("counters")) == {**dict(before["counters"]), "answer_bytes": 0}
    assert after == {table: before[table] for table in after}
    with kvdb.open(path) as store:
        assert store.sql("SELECT * FROM hourly_hits").rows == [
            ("1970-01-01 01:00", 2, 200, 160, 0.8, 1),
            ("1970-01-01 02:00", 2, 8, 0, 0.0, 0),
        ]
        # 160 tokens at 2 ms, less 9 ms of restoring.
        assert store.sql(
            "SELECT namespace_id, requests, tokens_per_second, seconds_saved FROM savings"
        ).rows == [(None, 1, None, None), (1, 3, 500.0, 0.311)]
        assert store.sql("SELECT miss_reason, requests FROM miss_reasons").rows == [("diverged", 2)]
        assert store.sql("SELECT sum(evictions) FROM daily_evictions").rows == [
            (len(before["evictions"]),)
        ]
        live = sum(row[2] == "live" for row in before["shards"])
        assert store.sql("SELECT shards FROM daily_wear").rows == [(live,)]
        assert store.sql("SELECT DISTINCT matched_tokens, ttft_ms FROM hit_history").rows == [
            (None, 8.0)
        ]
        namespace = open_namespace(store)
        assert check_prefix(store, namespace, TOKENS) == len(TOKENS)
        assert store.verify(data=True).problems == []
        put_all(store, namespace, random_tokens(3, BLOCK))


def test_an_old_store_is_migrated_when_it_is_opened(old: Path) -> None:
    before = contents(old / "index.sqlite")
    assert before["version"] == [(1,)]
    assert before["evictions"]
    with pytest.raises(StoreUnavailable, match="run kvdb migrate"):
        kvdb.open(old, read_only=True)
    assert contents(old / "index.sqlite") == before
    check(old, before)
    saved = contents(old / "index.backup")
    assert saved["requests"] == before["requests"]
    assert kvdb.migrate(old) == []


def test_kvdb_migrate_does_it_too(old: Path) -> None:
    before = contents(old / "index.sqlite")
    assert kvdb.migrate(old) == [name for name, _ in driver.migration_files()[1:]]
    check(old, before)


def test_a_migration_killed_half_way_changes_nothing_and_is_done_again(old: Path) -> None:
    before = contents(old / "index.sqlite")
    for statement in (2, 24, 48):
        done = run(DIE, str(old), str(statement))
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert contents(old / "index.sqlite") == before
    check(old, before)


def test_an_old_store_that_is_rebuilt_keeps_its_history(old: Path) -> None:
    before = contents(old / "index.sqlite")
    kvdb.rebuild(old)
    with kvdb.open(old) as store:
        assert store.sql("SELECT count(*) FROM requests").rows == [(len(before["requests"]),)]
        assert store.sql("SELECT sum(requests) FROM tenant_usage").rows == [(4,)]
        # What was found was not written now.
        assert store.sql("SELECT * FROM daily_wear").rows == []


def test_an_opener_waits_for_others_that_found_the_store_old(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(old / "index.sqlite")
    other = share_store(old)

    class Queueing(FileLock):
        def acquire(
            self, *, shared: bool = False, blocking: bool = True, create: bool = True
        ) -> bool:
            if blocking and not shared:
                other.release()  # it goes when someone waits
            return super().acquire(shared=shared, blocking=blocking, create=create)

    monkeypatch.setattr("kvdb.opening.FileLock", Queueing)
    check(old, before)


def test_an_old_store_in_use_is_left_alone(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdb.opening.LOCK_WAIT_SECONDS", 0.05)
    before = contents(old / "index.sqlite")
    lock = share_store(old)
    with pytest.raises(StoreLocked, match="older schema 1"):
        kvdb.open(old)
    lock.release()
    assert contents(old / "index.sqlite") == before
    check(old, before)
