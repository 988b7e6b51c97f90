"""Scripts on standard input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import kvdb
from kvdb import RequestRecord
from tests.cli.conftest import Run, environment, one_sentence, read_only, run, spawn

__all__ = ["environment", "read_only", "run", "spawn"]


@pytest.fixture
def shell(spawn: Run, lived_in: Path) -> Callable[..., object]:
    def call(script: str, *arguments: str):  # type: ignore[no-untyped-def]
        return spawn("shell", "--store", str(lived_in), *arguments, stdin=script)

    return call


def test_a_script_runs_to_its_end(shell) -> None:  # type: ignore[no-untyped-def]
    done = shell("SELECT 1 AS a; SELECT 2\n AS b;\n.mode json\n.miss\n-- done\nSELECT 3 AS c")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:6] == ["a", "---", "1", "b", "---", "2"]
    last = done.stdout.splitlines()[-1]
    assert json.loads(last) == [{"c": 3}]


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("SELECT 1;\n\nSELECT\n nope;\nSELECT 2 AS no;", 3),
        (".mode json\n.nope\nSELECT 2 AS no;", 2),
        ("SELECT 'open;\n", 1),
        ("DELETE FROM requests;\nSELECT 2 AS no;", 1),
    ],
)
def test_the_first_error_ends_it_and_names_its_line(shell, script: str, line: int) -> None:  # type: ignore[no-untyped-def]
    done = shell(script)
    assert done.returncode == 1
    assert one_sentence(done).startswith(f"Line {line}: ")
    assert "no" not in done.stdout


def test_bytes_that_are_no_text(run: Run, lived_in: Path) -> None:
    done = run("shell", "--store", lived_in, stdin=b"SELECT 1;\n\xff\xfe;")  # type: ignore[arg-type]
    assert done.returncode == 1
    assert "UTF-8" in one_sentence(done)


def test_new_rows_are_seen_between_statements(lived_in: Path, environment, tmp_path) -> None:  # type: ignore[no-untyped-def]
    import subprocess
    import sys

    process = subprocess.Popen(
        [sys.executable, "-m", "kvdb", "--store", lived_in, "shell", "--mode", "nl"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, kvdb.open(lived_in) as store:
        counts = []
        for _ in range(2):
            process.stdin.write("SELECT count(*) AS n FROM requests WHERE client = 'between';\n")
            process.stdin.flush()
            counts.append(json.loads(process.stdout.readline())["n"])
            store.record(RequestRecord(1, None, 1, 0, 0, 1, 0, "none", client="between"))
            store.flush()
        process.stdin.close()
    assert counts == [0, 1]
    assert process.returncode == 0


def test_an_unwritable_folder_can_be_asked(
    shell,
    lived_in: Path,
    read_only: Callable[[Path], None],  # type: ignore[no-untyped-def]
) -> None:
    read_only(lived_in)
    done = shell(".savings\nSELECT count(*) AS blocks FROM blocks;")
    assert done.returncode == 0, done.stderr
    assert "blocks" in done.stdout
