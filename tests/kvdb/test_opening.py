"""Opening: what is not a store, what is too new, who may share it, and what the dead left."""

from __future__ import annotations

import os
import sqlite3 as independent  # noqa: TID251 - another library makes the files
import subprocess
import sys
from pathlib import Path

import pytest

import kvdb
from kvdb import driver
from kvdb.errors import (
    IntegrityError,
    NotAStore,
    StoreLocked,
    StoreMissing,
    StoreTooNew,
    StoreUnavailable,
    UsageError,
)
from kvdb.locks import FileLock
from kvdb.opening import claim_store
from tests.support import BLOCK, check_prefix, open_namespace, put_all, random_tokens


def test_nothing_there(path: Path) -> None:
    with pytest.raises(StoreMissing):
        kvdb.open(path, create=False)
    with pytest.raises(StoreMissing):
        kvdb.open(path, read_only=True)
    assert not path.exists()


def test_what_is_not_a_store_is_refused_and_left_alone(path: Path) -> None:
    path.write_text("a file")
    with pytest.raises(NotAStore):
        kvdb.open(path)
    assert path.read_text() == "a file"
    path.unlink()
    path.mkdir()
    (path / "thesis.txt").write_text("a folder of someone's")
    with pytest.raises(NotAStore):
        kvdb.open(path)
    assert [entry.name for entry in path.iterdir()] == ["thesis.txt"]
    (path / "thesis.txt").unlink()
    connection = independent.connect(path / "index.sqlite")
    connection.execute("CREATE TABLE other (x)")
    connection.commit()
    connection.close()
    for options in ({}, {"read_only": True}):
        with pytest.raises(NotAStore, match="another program"):
            kvdb.open(path, **options)
    (path / "index.sqlite").write_bytes(b"not sqlite at all" * 100)
    with pytest.raises((NotAStore, IntegrityError)):
        kvdb.open(path)


def test_a_newer_store_is_refused(path: Path) -> None:
    kvdb.open(path).close()
    connection = independent.connect(path / "index.sqlite")
    connection.execute("PRAGMA user_version = 999")
    connection.close()
    for options in ({}, {"read_only": True}):
        with pytest.raises(StoreTooNew, match="upgrade kvdb"):
            kvdb.open(path, **options)
    with pytest.raises(StoreTooNew):
        kvdb.migrate(path)


def test_an_index_that_went_missing_is_not_replaced_by_an_empty_one(path: Path) -> None:
    with kvdb.open(path) as store:
        put_all(store, open_namespace(store), random_tokens(1, BLOCK))
    (path / "index.sqlite").unlink()
    with pytest.raises(IntegrityError, match="kvdb rebuild"):
        kvdb.open(path)
    assert not (path / "index.sqlite").exists()


def test_migrate_is_idempotent_and_leaves_a_record(path: Path) -> None:
    with kvdb.open(path) as store:
        names = [name for (name,) in store.sql("SELECT name FROM migration_files").rows]
    assert names == [name for name, _ in driver.migration_files()]
    assert kvdb.migrate(path) == []


def test_a_schema_of_other_text_under_the_same_number_is_refused_and_rebuilt(path: Path) -> None:
    tokens = random_tokens(1, BLOCK)
    with kvdb.open(path) as store:
        put_all(store, open_namespace(store), tokens)
    connection = independent.connect(path / "index.sqlite")
    connection.execute("UPDATE migration_files SET sha256 = 'other'")
    connection.commit()
    connection.close()
    for options in ({}, {"read_only": True}):
        with pytest.raises(IntegrityError, match="development version"):
            kvdb.open(path, **options)
    kvdb.rebuild(path)
    with kvdb.open(path) as store:
        assert check_prefix(store, open_namespace(store), tokens) == BLOCK


@pytest.mark.parametrize(
    ("version", "affected"),
    [
        ("3.6.23", False),
        ("3.7.0", True),
        ("3.40.1", True),
        ("3.44.5", True),
        ("3.44.6", False),
        ("3.50.4", True),
        ("3.50.7", False),
        ("3.51.2", True),
        ("3.51.3", False),
        ("3.52.0", True),
        ("3.53.4", False),
    ],
)
def test_versions_with_the_wal_reset_bug(version: str, affected: bool) -> None:
    assert driver.has_wal_reset_bug(version) == affected


def test_opening_waits_for_no_one_but_refuses_while_the_store_is_claimed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kvdb.open(path).close()
    monkeypatch.setattr("kvdb.opening.LOCK_WAIT_SECONDS", 0.05)
    lock = claim_store(path)
    with pytest.raises(StoreLocked, match="migrated or rebuilt"):
        kvdb.open(path)
    lock.release()
    kvdb.open(path).close()


def test_four_first_openers_at_once_make_one_store(path: Path) -> None:
    code = (
        "import sys, kvdb;"
        "from tests.support import *;"
        "s = kvdb.open(sys.argv[1]); n = open_namespace(s);"
        "put_all(s, n, random_tokens(int(sys.argv[2]), 40)); s.close()"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(n)],
            env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        )
        for n in range(4)
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0, 0]
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        for seed in range(4):
            assert check_prefix(store, namespace, random_tokens(seed, 40)) == 40
        assert store.verify(data=True).problems == []


def test_what_a_dead_process_left_is_settled_at_the_next_open(path: Path) -> None:
    tokens = random_tokens(1, 2 * BLOCK)
    store = kvdb.open(path)
    namespace = open_namespace(store)
    put_all(store, namespace, tokens)
    lease = store.lease(namespace, tokens)
    assert lease.sequence is not None
    with store.database.write() as connection:
        (process_id,) = connection.execute("SELECT id FROM processes").fetchone()
        connection.execute(
            "INSERT INTO shards (uuid, state, namespace_id, process_id, nbytes, created_at) "
            "VALUES (?, 'writing', 1, ?, 1000, 0)",
            ("cd" * 16, process_id),
        )
    (path / "tmp" / ("cd" * 16 + ".safetensors")).write_bytes(b"half a shard")
    # Die without a word: the kernel frees the locks, nothing else happens.
    store.database.close()
    assert store._process_lock is not None
    store._process_lock.release()
    with kvdb.open(path) as again:
        assert list((path / "tmp").iterdir()) == []
        info = again.info()
        assert (info.leftovers, info.counters["leftovers_swept"], info.processes) == (0, 1, 1)
        assert again.sql("SELECT count(*) FROM sequences").rows == [(0,)]
        assert again.sql("SELECT max(refs) FROM blocks WHERE depth = 1").rows == [(0,)]
        assert check_prefix(again, open_namespace(again), tokens) == 2 * BLOCK
        assert again.verify().problems == []


def test_a_living_process_is_not_settled(path: Path) -> None:
    with kvdb.open(path) as first:
        namespace = open_namespace(first)
        tokens = random_tokens(1, BLOCK)
        put_all(first, namespace, tokens)
        with first.lease(namespace, tokens), kvdb.open(path) as second:
            assert second.info().processes == 2
            assert second.sql("SELECT count(*) FROM sequences").rows == [(1,)]


@pytest.mark.parametrize(
    "options",
    [{"durability": "hope"}, {"codec": "gzip"}, {"max_bytes": 10}, {"min_free_bytes": -1}],
)
def test_bad_options_are_refused(path: Path, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        kvdb.open(path, **options)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_said(path: Path) -> None:
    path.mkdir(mode=0o500)
    with pytest.raises(StoreUnavailable):
        kvdb.open(path / "inside")


def test_a_file_lock_is_free_when_its_holder_is_gone(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire()
    assert not second.acquire(blocking=False)
    first.release()
    assert second.acquire(blocking=False)
    second.release()
