"""Statements in a child: bombs are stopped in time and memory, and the parent goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvdb.errors import MissingParameter, QueryError, StoreMissing
from kvdb.sandbox import SandboxProcess, SqlResult, run_in_child
from tests.sandbox.bombs import BOMBS

DEADLINE = 0.3
SLACK = 0.5
# A busy machine is slow now and then; what cannot be stopped is slow each time.
TRIES = 3
UNSTOPPABLE = BOMBS["a row of long functions"]
ENDLESS = BOMBS["endless recursion"]


@pytest.fixture(scope="module")
def child(filled: Path) -> Iterator[SandboxProcess]:
    with SandboxProcess(filled) as process:
        yield process


def pid_of(process: SandboxProcess) -> int:
    """Of the child that runs now; 0, which is nobody, between two."""
    return process._process.pid if process._process else 0


@contextmanager
def memory_peak(pid: Callable[[], int]) -> Iterator[list[int]]:
    """The most resident memory that a process has had since it was started, in MiB, read while it
    runs. What the kernel says at its end counts also the memory of what it was forked from."""
    peaks = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            try:
                status = Path(f"/proc/{pid()}/status").read_text()
            except OSError:
                continue
            found = re.search(r"VmHWM:\s+(\d+)", status)  # a dead child has none
            peaks[0] = max(peaks[0], int(found[1]) >> 10 if found else 0)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("sql", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_are_stopped(child: SandboxProcess, sql: str) -> None:
    for _ in range(TRIES):
        child.run("SELECT 1")  # its start does not count
        with memory_peak(lambda: pid_of(child)) as peaks:
            started = time.monotonic()
            with pytest.raises(QueryError) as caught:
                child.run(sql, limit=10**9, deadline=DEADLINE)
            took = time.monotonic() - started
        assert peaks[0] < 256
        if took < DEADLINE + SLACK:
            break
    assert took < DEADLINE + SLACK
    assert str(caught.value).endswith(".")
    assert child.run("SELECT 1").rows == [(1,)]


def test_memory_has_a_limit_of_its_own(filled: Path) -> None:
    with SandboxProcess(filled, memory=128 << 20) as process:
        process.run("SELECT 1")
        with (
            memory_peak(lambda: pid_of(process)) as peaks,
            pytest.raises(QueryError, match="more memory"),
        ):
            process.run(BOMBS["doubling strings and keeping them"], deadline=30)
        assert peaks[0] < 128


def test_what_sqlite_cannot_interrupt_is_killed(filled: Path) -> None:
    """With memory enough to go on for many seconds."""
    started = time.monotonic()
    with pytest.raises(QueryError, match=r"stopped after 0\.3 seconds"):
        run_in_child(filled, UNSTOPPABLE, deadline=DEADLINE, memory=1 << 30)
    assert time.monotonic() - started < DEADLINE + SLACK + 2  # its start counts here


@pytest.mark.parametrize("sql", [ENDLESS, UNSTOPPABLE], ids=["politely", "by force"])
def test_an_interrupt_ends_the_statement_and_not_the_child(filled: Path, sql: str) -> None:
    with SandboxProcess(filled, memory=1 << 30) as process:
        process.run("SELECT 1")
        timer = threading.Timer(0.2, process.interrupt)
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            process.run(sql, deadline=60)
        assert time.monotonic() - started < 1.5
        assert process.run("SELECT 1").rows == [(1,)]


def test_values_cross_unchanged(child: SandboxProcess) -> None:
    row = (None, -(1 << 63), 1.5, float("inf"), 'a\0"\n\u2028😀', b"\0\xff", "")
    sql = "SELECT :a AS a, :b AS b, :c AS c, :d AS d, :e AS e, :f AS f, :g AS a"
    result = child.run(sql, dict(zip("abcdefg", row, strict=True)))
    assert result == SqlResult((*"abcdef", "a"), [row], capped=False)
    assert child.run("SELECT id FROM blocks", limit=2).capped


def test_errors_cross_by_their_class(child: SandboxProcess, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="No such table"):
        child.run("SELECT * FROM nowhere")
    with pytest.raises(MissingParameter) as caught:
        child.run("SELECT :x")
    assert caught.value.name == "x"
    with pytest.raises(StoreMissing):
        run_in_child(tmp_path / "nowhere", "SELECT 1")


def test_a_child_that_dies_is_an_error_and_the_next_one_works(filled: Path) -> None:
    with SandboxProcess(filled) as process:
        process.run("SELECT 1")
        assert process._process is not None
        process._process.kill()
        with pytest.raises(QueryError):
            process.run("SELECT 1")
        assert process.run("SELECT 1").rows == [(1,)]


def test_new_rows_are_seen_and_the_child_ends(filled: Path) -> None:
    import kvdb
    from kvdb import RequestRecord

    with SandboxProcess(filled) as process:
        (before,) = process.run("SELECT count(*) FROM requests").rows[0]
        with kvdb.open(filled) as store:
            store.record(RequestRecord(9, None, 1, 0, 0, 1, 0, "none"))
            store.flush()
            assert process.run("SELECT count(*) FROM requests").rows == [(before + 1,)]
        pid = process._process.pid if process._process else 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_program_stops_bombs_too(filled: Path) -> None:
    """As a process of its own, with all its output: time from the same program's shortest run."""
    program = [
        sys.executable,
        "-m",
        "kvdb",
        "--store",
        str(filled),
        "query",
        "--limit",
        "999999999",
    ]

    def run(sql: str, *more: str) -> tuple[float, int, int, str]:
        started = time.monotonic()
        process = subprocess.Popen(
            [*program, sql, *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        with memory_peak(lambda: process.pid) as peaks:
            _, said = process.communicate()
        return time.monotonic() - started, process.returncode, peaks[0], said

    for name in ("a row of long functions", "200 MB in many rows"):
        for _ in range(TRIES):
            idle, code, _, _ = run("SELECT 1")
            assert code == 0
            took, code, peak, said = run(BOMBS[name], "--timeout", str(DEADLINE))
            assert (code, said.count("\n")) == (1, 1), said
            assert said.startswith("Error: ")
            if sys.platform == "linux":
                assert 0 < peak < 256
            if took - idle < DEADLINE + SLACK:
                break
        assert took - idle < DEADLINE + SLACK
