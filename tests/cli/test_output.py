"""Rows in sqlite-utils' formats; data on stdout, talk on stderr."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

SQL = (
    "SELECT 1 AS id, 'a,\"b' AS text, x'00ff' AS bytes, NULL AS none, 1.5 AS real "
    "UNION ALL SELECT 20, '1e5', x'', NULL, 2.0"
)
ROW = {"id": 1, "text": 'a,"b', "bytes": "00ff", "none": None, "real": 1.5}


@pytest.fixture(autouse=True)
def _store(filled: Path) -> None:
    """Every test asks a real store."""


def test_json_is_the_default(run: Run) -> None:
    rows = json.loads(run("query", SQL).stdout)
    assert (rows[0], len(rows)) == (ROW, 2)
    assert json.loads(run("query", "SELECT 1 WHERE 0").stdout) == []
    assert json.loads(run("query", SQL, "--arrays").stdout)[0] == list(ROW.values())


def test_json_lines(run: Run) -> None:
    lines = run("query", SQL, "--nl").stdout.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [1, 20]
    assert json.loads(run("query", SQL, "--nl", "--arrays").stdout.splitlines()[1])[0] == 20


@pytest.mark.parametrize(("flag", "dialect"), [("--csv", "excel"), ("--tsv", "excel-tab")])
def test_separated_values(run: Run, flag: str, dialect: str) -> None:
    text = run("query", SQL, flag).stdout
    rows = list(csv.reader(io.StringIO(text), dialect))
    assert rows[0] == list(ROW)
    assert rows[1] == ["1", 'a,"b', "00ff", "", "1.5"]
    assert run("query", SQL, flag, "--no-headers").stdout == text.split("\n", 1)[1]


def test_tables(run: Run) -> None:
    lines = run("query", SQL, "--table").stdout.splitlines()
    assert lines[0].split() == list(ROW)
    assert "1e5" in lines[3]
    assert run("query", SQL, "--fmt", "github").stdout.startswith("|")
    assert run("query", "SELECT 1 AS a WHERE 0", "-t").stdout.split() == ["a", "---"]


def test_json_inside_json(run: Run) -> None:
    sql = "SELECT json_object('a', 1) AS j, '{broken' AS k"
    assert json.loads(run("query", sql).stdout)[0]["j"] == '{"a":1}'
    assert json.loads(run("query", sql, "--json-cols").stdout) == [{"j": {"a": 1}, "k": "{broken"}]


def test_other_characters(run: Run) -> None:
    assert "é" in run("query", "SELECT 'é' AS a").stdout
    assert "\\u00e9" in run("query", "SELECT 'é' AS a", "--ascii").stdout


def test_two_columns_of_one_name(run: Run) -> None:
    assert json.loads(run("query", "SELECT 1 AS a, 2 AS a").stdout) == [{"a": 1, "a_2": 2}]


def test_parameters_files_and_stdin(run: Run, tmp_path: Path) -> None:
    sql = "SELECT :a AS a, :b AS b"
    (tmp_path / "q.sql").write_text(sql)
    for arguments, stdin in (([sql], None), (["-"], sql), (["--file", tmp_path / "q.sql"], None)):
        done = run("query", *arguments, "-p", "a", "1", "-p", "b", "x", stdin=stdin)
        assert json.loads(done.stdout) == [{"a": "1", "b": "x"}]
    missing = run("query", "--file", tmp_path / "nowhere.sql")
    assert missing.returncode == 1


def test_a_capped_result_is_announced_on_stderr(run: Run) -> None:
    done = run("query", "SELECT name FROM counters", "--limit", "2")
    assert len(json.loads(done.stdout)) == 2
    assert "first 2 rows" in done.stderr
    assert run("query", "SELECT 1", "--limit", "1").stderr == ""


@pytest.mark.parametrize("kind", ["blocks", "shards", "namespaces", "sequences", "requests"])
def test_ls(run: Run, kind: str) -> None:
    rows = json.loads(run("ls", kind).stdout)
    expected = {"blocks": 6, "shards": 2, "namespaces": 1, "sequences": 0, "requests": 0}
    assert len(rows) == expected[kind]
    assert json.loads(run("ls", kind, "--namespace", "7").stdout) == []


def test_ls_filters(run: Run) -> None:
    first = json.loads(run("ls", "blocks", "--limit", "1").stdout)[0]
    found = json.loads(run("ls", "blocks", "--hash", first["hash"][:12].upper()).stdout)
    assert [row["hash"] for row in found] == [first["hash"]]
    assert json.loads(run("ls", "blocks", "--state", "evicted").stdout) == []
    assert json.loads(run("ls", "requests", "--skip", "full").stdout) == []


def test_info_and_doctor(run: Run, path: Path) -> None:
    document = json.loads(run("info", "--json").stdout)
    assert (document["live_blocks"], document["path"]) == (6, str(path))
    text = run("info").stdout
    assert "6 live" in text
    assert "KVDB_STORE" in text
    done = run("doctor", "--json", KVDB_MODELS=str(path.parent))
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["store"]["status"] == "ok"
    assert checks["sqlite"]["detail"]
    origins = {row["setting"]: row["origin"] for row in json.loads(done.stdout)["settings"]}
    assert (origins["store"], origins["models"], origins["codec"]) == (
        "KVDB_STORE",
        "KVDB_MODELS",
        "default",
    )


def test_doctor_names_what_fails_and_what_to_do(run: Run, path: Path) -> None:
    (path / "index.sqlite").write_bytes(b"garbage")
    done = run("doctor")
    assert done.returncode == 3
    assert "fail" in done.stdout
    bad = run("doctor", KVDB_REUSE="most")
    assert (bad.returncode, "KVDB_REUSE" in bad.stdout) == (3, True)
