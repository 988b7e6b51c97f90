"""Rows in sqlite-utils' formats; data on stdout, talk on stderr."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

import kvdb
from kvdb import RequestRecord
from kvdb.cli.query import query
from kvdb.listing import LISTINGS
from tests.cli.conftest import Run, one_sentence

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


def test_raw_is_the_bare_value(run: Run, spawn: Run) -> None:
    assert run("query", SQL, "--raw").stdout == "1"
    assert run("query", SQL, "--raw-lines").stdout == "1\n20\n"
    assert spawn("query", "SELECT x'4100ff0a'", "-r", text=False).stdout == b"A\0\xff\n"
    assert run("query", "SELECT 1 WHERE 0", "--raw").stdout == ""


def test_the_flags_are_those_of_sqlite_utils() -> None:
    """All of `sqlite-utils query` but what opens files or runs code."""
    from sqlite_utils.cli import cli as theirs

    def flags(command: click.Command) -> set[str]:
        return {name for parameter in command.params for name in parameter.opts}

    missing = flags(theirs.commands["query"]) - flags(query)
    assert missing == {"path", "--attach", "--functions", "--load-extension"}


@pytest.mark.parametrize(
    ("flag", "rows"),
    [("", 1), ("--nl", 1), ("--csv", 1), ("-t", 1), ("--raw", 1), ("", 5000), ("--csv", 5000)],
)
def test_a_closed_pipe_ends_every_format_alike(
    environment: dict[str, str], flag: str, rows: int
) -> None:
    sql = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i, hex(i) FROM n"
    reader, writer = os.pipe()
    os.close(reader)
    arguments = ["query", f"{sql} LIMIT {rows}", "--limit=9999", *filter(None, [flag])]
    done = subprocess.run(
        [sys.executable, "-m", "kvdb", *arguments],
        env=environment,
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_closed_streams_are_empty_ones(environment: dict[str, str], path: Path) -> None:
    with kvdb.open(path, min_free_bytes=0):
        pass
    for verb, streams in (("query -", "<&-"), ("shell", "<&-"), ("query 'SELECT 1'", "<&- >&-")):
        done = subprocess.run(  # noqa: S602
            f"exec {sys.executable} -m kvdb {verb} {streams}",
            shell=True,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.stdout == ""
        assert done.returncode == (1 if verb == "query -" else 0), done.stderr
        assert len(done.stderr.splitlines()) == done.returncode


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


def test_what_is_missing_is_said_with_the_next_step(run: Run) -> None:
    assert "add -p x VALUE" in run("query", "SELECT :x").stderr
    assert "name, such as :id" in run("query", "SELECT ?", "-p", "x", "1").stderr
    assert "CAST(:name AS INTEGER)" in run("query", "SELECT 1 LIMIT :n", "-p", "n", "x").stderr
    assert "--write" in run("query", "DELETE FROM requests").stderr
    assert "not UTF-8" in run("query", "-", stdin=b"\xff").stderr


def test_settings_can_be_written(run: Run) -> None:
    change = "UPDATE settings SET value = :value WHERE key = 'history_requests'"
    done = run("query", "--write", change, "-p", "value", "77")
    assert json.loads(done.stdout) == [{"rows_affected": 1}]
    assert run("query", "--write", change, "-p", "value", "lots").returncode == 1
    assert run("query", "--write", "DELETE FROM blocks").returncode == 1
    kept = "SELECT value FROM settings WHERE key = 'history_requests'"
    assert run("query", kept, "--raw").stdout == "77"


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


def test_ls_requests_filters(run: Run, path: Path) -> None:
    now = time.time_ns() // 1000
    with kvdb.open(path) as store:
        namespace = store.namespaces()[0].id
        for number, (tenant, client, tokens) in enumerate([("a", "x", 10), ("b", "x", 20)]):
            started = now - number * 7200 * 1_000_000
            store.record(
                RequestRecord(
                    started,
                    namespace,
                    tokens,
                    0,
                    0,
                    tokens,
                    1,
                    "none",
                    tenant=tenant,
                    client=client,
                )
            )
        store.flush()

    def found(*arguments: str) -> list[str]:
        rows = json.loads(run("ls", "requests", *arguments).stdout)
        return [row["tenant"] for row in rows]

    assert found() == ["b", "a"]
    assert found("--tenant", "a") == ["a"]
    assert found("--client", "x", "--min-tokens", "11") == ["b"]
    assert (found("--since", "1h"), found("--until", "1h")) == (["a"], ["b"])
    assert (found("--since", "1970-01-02"), found("--until", "1970-01-02")) == (["b", "a"], [])
    assert (found("--model", "w"), found("--model", "gpt")) == (["b", "a"], [])
    assert found("--limit", "1") == ["b"]


@pytest.mark.parametrize("kind", LISTINGS)
def test_ls_takes_every_filter_it_names(run: Run, kind: str) -> None:
    values = {"queue": "hot", "origin": "decode", "state": "live", "skip": "full", "hash": "ab"}
    times = {"since": "2d", "until": "2026-08-31T10:00+02:00"}
    for name in LISTINGS[kind].filters:
        value = {**values, **times}.get(name, "5")
        done = run("ls", kind, f"--{name.replace('_', '-')}", value)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("requests", "--since", "yesterday"),
        ("blocks", "--hash", "xyz"),
        ("blocks", "--skip", "full"),
        ("shards", "--min-tokens", "1"),
        ("cakes",),
    ],
)
def test_ls_says_what_does_not_apply(run: Run, arguments: tuple[str, ...]) -> None:
    done = run("ls", *arguments)
    assert done.returncode == 2
    one_sentence(done)


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
