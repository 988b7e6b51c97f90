"""Exit codes, and one sentence for whatever is wrong with the input."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import kvdb
from kvdb.driver import sqlite3
from tests.cli.conftest import Run, one_sentence
from tests.support import shard_files

GOLDEN = Path(__file__).parents[1] / "golden"
READERS = [
    ("info",),
    ("ls", "blocks"),
    ("query", "SELECT 1"),
    ("verify",),
]
ALL = [*READERS, ("evict", "--to", "1GB", "--yes"), ("migrate",), ("rebuild",)]


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a store, but for what SQLite makes while it reads."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and not file.name.endswith(("-wal", "-shm"))
    }


@pytest.mark.parametrize("verb", ALL)
def test_0_a_good_store(run: Run, filled: Path, verb: tuple[str, ...]) -> None:
    done = run(*verb)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ALL)
def test_10_no_store(run: Run, path: Path, verb: tuple[str, ...]) -> None:
    done = run(*verb)
    assert done.returncode == 10
    assert str(path) in one_sentence(done)
    assert not path.exists()


@pytest.mark.parametrize("verb", [("migrate",), ("rebuild",)])
def test_11_a_store_in_use(run: Run, claimed: Path, verb: tuple[str, ...]) -> None:
    done = run(*verb)
    assert done.returncode == 11
    assert "in use by another process" in one_sentence(done)


@pytest.mark.parametrize("verb", ALL)
def test_12_a_store_of_a_newer_program(run: Run, filled: Path, verb: tuple[str, ...]) -> None:
    connection = sqlite3.connect(filled / "index.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    shards = {file: file.read_bytes() for file in shard_files(filled)}
    done = run(*verb)
    assert done.returncode == 12, done.stderr
    assert "upgrade kvdb" in one_sentence(done)
    assert {file: file.read_bytes() for file in shard_files(filled)} == shards


@pytest.mark.parametrize("verb", READERS)
@pytest.mark.parametrize("garbage", [b"not a database", b"SQLite format 3\0" + b"\xa5" * 5000])
def test_13_a_damaged_index(run: Run, filled: Path, verb: tuple[str, ...], garbage: bytes) -> None:
    (filled / "index.sqlite").write_bytes(garbage)
    before = contents(filled)
    done = run(*verb)
    assert done.returncode == 13, done
    assert "rebuild" in one_sentence(done)
    assert contents(filled) == before
    rebuilt = run("rebuild")
    # History since the backup may be lost, and that is said.
    assert (rebuilt.returncode, "newer than the backup" in rebuilt.stdout) == (3, True)
    assert run(*verb).returncode == 0


def test_13_a_missing_index_and_its_rebuild(run: Run, filled: Path) -> None:
    before = run("query", "SELECT hash, depth FROM block_usage ORDER BY hash").stdout
    for file in filled.glob("index.*"):
        file.unlink()
    done = run("evict", "--to", "1GB", "--yes")
    assert done.returncode == 13
    assert "rebuild" in one_sentence(done)
    rebuilt = run("rebuild")
    assert (rebuilt.returncode, "history" in rebuilt.stdout) == (3, True)  # the backup is gone too
    assert run("query", "SELECT hash, depth FROM block_usage ORDER BY hash").stdout == before


@pytest.mark.parametrize("verb", ALL)
def test_13_an_unreadable_folder(run: Run, filled: Path, verb: tuple[str, ...]) -> None:
    nobody = 65534 if os.geteuid() == 0 else None
    run(*verb)  # loads the modules that nobody may not read either
    filled.chmod(0)
    try:
        done = run(*verb, user=nobody)
    finally:
        filled.chmod(0o700)
    assert done.returncode == 13
    assert str(filled) in one_sentence(done)


@pytest.mark.parametrize("verb", [("evict", "--to", "1GB", "--yes"), ("verify", "--repair")])
def test_13_a_folder_with_other_files(run: Run, path: Path, verb: tuple[str, ...]) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("years of work")
    done = run(*verb)
    assert done.returncode in (10, 13)
    one_sentence(done)
    assert contents(path) == {"thesis.txt": b"years of work"}


def test_3_problems_found_and_repaired(run: Run, filled: Path) -> None:
    shard = shard_files(filled)[0]
    shard.chmod(0o600)
    shard.write_bytes(shard.read_bytes()[:-7])
    found = run("verify", "--data")
    assert found.returncode == 3
    problems = json.loads(found.stdout)
    assert problems
    assert not any(problem["repaired"] for problem in problems)
    assert run("verify", "--data", "--repair").returncode == 0
    again = run("verify", "--data")
    assert (again.returncode, json.loads(again.stdout)) == (0, [])


@pytest.mark.parametrize(
    "sql",
    [
        "SELEC 1",
        "",
        "DELETE FROM blocks",
        "SELECT 1; SELECT 2",
        "SELECT * FROM nowhere",
        "ATTACH 'x' AS x",
        "SELECT zeroblob(1e9)",
        "SELECT :missing",
    ],
)
def test_1_bad_sql(run: Run, filled: Path, sql: str) -> None:
    before = contents(filled)
    done = run("query", sql)
    assert (done.returncode, done.stdout) == (1, "")
    one_sentence(done)
    assert contents(filled) == before


def test_1_sql_that_outgrows_memory_or_time(spawn: Run, filled: Path) -> None:
    grow = (
        "WITH RECURSIVE t(n, x) AS (SELECT 0, 'ab' UNION ALL SELECT n + 1, x || x FROM t "
        "WHERE n < 40) SELECT length(x) FROM t"
    )
    done = spawn("query", grow)
    assert done.returncode == 1
    assert "memory" in one_sentence(done)
    endless = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT max(n) FROM t"
    done = spawn("query", endless, "--timeout", "0.2")
    assert done.returncode == 1
    assert "0.2 seconds" in one_sentence(done)


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("info", "--nonsense"),
        ("ls",),
        ("ls", "everything"),
        ("ls", "blocks", "--skip", "full"),
        ("query",),
        ("query", "SELECT 1", "--file", "x.sql"),
        ("query", "SELECT 1", "--limit", "-1"),
        ("query", "SELECT 1", "--timeout", "nan"),
        ("query", "SELECT 1", "--timeout", "inf"),
        ("report", "--namespace", str(1 << 63)),
        ("query", "SELECT 1", "--csv", "--table"),
        ("query", "SELECT 1", "--fmt", "nonsense"),
        ("evict",),
        ("evict", "--to", "lots"),
        ("verify", "--sample", "3"),
        ("generate",),
        ("generate", "--prompt", "x", "--tokens", "/dev/null"),
        ("generate", "--prompt", "x", "--block-tokens", "100"),
        ("generate", "--prompt", ""),
        ("generate", "--prompt", "x", "--max-tokens", "0"),
        ("generate", "--prompt", "x", "--temp", "-1"),
        ("generate", "--prompt", "x", "--kv-bits", "5"),
        ("generate", "--prompt", "x", "--chat-template-config", "{"),
        ("generate", "--tokens", "/dev/null"),
    ],
)
def test_2_wrong_use(run: Run, filled: Path, arguments: tuple[str, ...]) -> None:
    before = contents(filled)
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    one_sentence(done)
    assert contents(filled) == before


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVDB_MAX_BYTES", "plenty"),
        ("KVDB_DURABILITY", "eternal"),
        ("KVDB_BLOCK_TOKEN", "256"),
        ("KVDB_CONFIG", "/nowhere/kvdb.toml"),
    ],
)
def test_2_bad_settings(run: Run, filled: Path, variable: str, value: str) -> None:
    done = run("info", **{variable: value})
    assert done.returncode == 2
    assert variable in one_sentence(done)


@pytest.mark.parametrize("verb", READERS)
def test_a_read_only_folder_can_be_read(
    run: Run, filled: Path, read_only: Callable[[Path], None], verb: tuple[str, ...]
) -> None:
    before = contents(filled)
    read_only(filled)
    done = run(*verb)
    assert done.returncode == 0, done.stderr
    assert contents(filled) == before


@pytest.mark.parametrize(
    "verb",
    [
        ("evict", "--to", "1", "--yes"),
        ("verify", "--repair"),
        ("rebuild",),
    ],
)
def test_a_read_only_folder_cannot_be_written(
    run: Run, filled: Path, read_only: Callable[[Path], None], verb: tuple[str, ...]
) -> None:
    before = contents(filled)
    read_only(filled)
    done = run(*verb)
    assert done.returncode in (1, 13)
    one_sentence(done)
    assert contents(filled) == before


def test_evict(run: Run, filled: Path) -> None:
    unsure = run("evict", "--to", "0")
    assert (unsure.returncode, "6 blocks" in one_sentence(unsure)) == (2, True)
    dry = run("evict", "--to", "0", "--dry-run")
    assert (dry.returncode, "Would evict 6 blocks" in dry.stderr) == (0, True), dry.stderr
    assert shard_files(filled)
    done = run("evict", "--to", "0", "--yes", "--json")
    assert json.loads(done.stdout)["blocks"] == 6
    assert not shard_files(filled)
    assert run("verify", "--data").returncode == 0


def test_a_store_of_an_older_program_asks_for_migrate(run: Run, path: Path) -> None:
    shutil.unpack_archive(GOLDEN / "schema_1.zip", path)
    for verb in READERS:
        done = run(*verb)
        assert (done.returncode, "run kvdb migrate" in one_sentence(done)) == (13, True)
    assert run("migrate").stdout == "0002_history\n0003_serving\n0004_remotes\n0005_sharing\n"
    assert all(run(*verb).returncode == 0 for verb in READERS)


def test_an_index_without_its_tables_is_none_of_ours(run: Run, path: Path) -> None:
    path.mkdir()
    connection = sqlite3.connect(path / "index.sqlite")
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    done = run("info")
    assert done.returncode == 13
    assert "another program" in one_sentence(done)
    with pytest.raises(kvdb.errors.NotAStore):
        kvdb.open(path)
