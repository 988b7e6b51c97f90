"""kill -9 at system calls, and an error from system calls, in everything that writes."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvdb
from tests.crash.oracle import Ledger, check_store
from tests.crash.progress import Run, spread, torture_folder
from tests.crash.scenes import THREADS, Scenes
from tests.crash.tracing import CHANGES, READS, Point, needs_strace, points, thread_of, traced
from tests.crash.zygote import Zygote

SHORT_KILLS, SHORT_ERRORS = 60, 40
KILLED = [operation for operation in THREADS if operation != "read"]
TYPED = {"StoreUnavailable", "OutOfSpace", "StoreReadOnly", "IntegrityError", "NotAStore"}


class Hurt:
    """Runs operations on copies of prepared stores with a fault at one system call."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self._zygote = zygote
        self._folder = folder
        self._scenes = Scenes(zygote, folder / "scenes")
        self.path = folder / "hurt"

    def calls(self, operation: str, which: str) -> list[Point]:
        """The system calls of an undisturbed run, in order."""
        log = self._folder / f"{operation}.log"
        self._scenes.copy(operation, self.path)
        worker = self._zygote.start(operation, self.path)
        thread = thread_of(worker.expect("ready"), THREADS[operation])
        with traced(worker, thread, "-o", str(log), "-e", f"trace={which}"):
            worker.say()
            lines = worker.rest()
        assert lines[-1] == "done"
        assert worker.wait() == 0
        return points(log)

    def kill(self, operation: str, point: Point) -> Ledger:
        call, number = point
        ledger = self._scenes.copy(operation, self.path)
        worker = self._zygote.start(operation, self.path)
        thread = thread_of(worker.expect("ready"), THREADS[operation])
        inject = f"inject={call}:signal=SIGKILL:when={number}"
        with traced(worker, thread, "-o", "/dev/null", "-e", f"trace={call}", "-e", inject):
            worker.say()
            lines = worker.rest()
        worker.wait()
        ledger.hear(lines)
        return ledger

    def fail(self, operation: str, point: Point, error: str) -> Ledger:
        """As kill, but the call fails with ``error``; what it leads to must be typed."""
        call, number = point
        ledger = self._scenes.copy(operation, self.path)
        worker = self._zygote.start("failing", self.path, operation=operation)
        thread = thread_of(worker.expect("ready"), THREADS[operation])
        inject = f"inject={call}:error={error}:when={number}"
        where = f"{operation}: {error} at {call} {number}"
        with traced(worker, thread, "-o", "/dev/null", "-e", f"trace={call}", "-e", inject):
            worker.say()
            lines = []
            while (line := worker.line()) not in ("ready", "done"):
                assert line is not None, f"{where}: worker died or hangs after {lines}"
                lines.append(line)
        if line == "ready":
            worker.say()
        lines += worker.rest()
        assert worker.wait() == 0, where
        ledger.hear(lines)
        for line in lines:
            if line.startswith("outcome"):
                _, what = line.split(maxsplit=1)
                assert what == "ok" or what in TYPED, f"{where}: {what}"
            assert line != "next put failed", where
            if line.startswith("skipped") and line != "skipped 0":
                # A shard that could not be read was left out, and said; now it can be.
                ledger.doubtful |= set(ledger.names)
                kvdb.rebuild(self.path)
        return ledger


def kill_everywhere(hurt: Hurt, run: Run, every: list[tuple[str, Point]]) -> None:
    for step in run.steps():
        operation, point = every[step]
        ledger = hurt.kill(operation, point)
        run.totals.tried += 1
        run.totals.acknowledged += len(ledger.acks)
        try:
            run.totals.add(check_store(hurt.path, ledger, repair=operation == "repair"))
        except Exception as error:
            error.add_note(f"after SIGKILL in {operation} at {point}")
            raise
    run.assert_nothing_lost()


def fail_everywhere(hurt: Hurt, run: Run, every: list[tuple[str, Point, str]]) -> None:
    for step in run.steps():
        operation, point, error = every[step]
        ledger = hurt.fail(operation, point, error)
        run.totals.tried += 1
        run.totals.acknowledged += len(ledger.acks)
        try:
            run.totals.add(check_store(hurt.path, ledger, repair=operation == "repair"))
        except Exception as wrong:
            wrong.add_note(f"after {error} in {operation} at {point}")
            raise
    run.assert_nothing_lost()


def all_kills(hurt: Hurt) -> list[tuple[str, Point]]:
    return [(name, point) for name in KILLED for point in hurt.calls(name, CHANGES)]


def all_errors(hurt: Hurt) -> list[tuple[str, Point, str]]:
    """EIO everywhere, ENOSPC where something is written. Locks and standard output do not fail."""
    found = []
    for name in THREADS:
        for call, number in hurt.calls(name, f"{CHANGES},{READS}"):
            if call in ("flock", "fcntl", "write"):
                continue
            found.append((name, (call, number), "EIO"))
            if call not in ("unlink", "unlinkat", *READS.split(",")):
                found.append((name, (call, number), "ENOSPC"))
    return found


@needs_strace
def test_database_malformed_after_kill_at_system_calls(zygote: Zygote, tmp_path: Path) -> None:
    hurt = Hurt(zygote, tmp_path)
    every = all_kills(hurt)
    chosen = [every[index] for index in spread(SHORT_KILLS, len(every))]
    kill_everywhere(hurt, Run("kill at calls", len(chosen)), chosen)


@needs_strace
def test_phantom_row_after_a_failed_system_call(zygote: Zygote, tmp_path: Path) -> None:
    hurt = Hurt(zygote, tmp_path)
    every = all_errors(hurt)
    chosen = [every[index] for index in spread(SHORT_ERRORS, len(every))]
    fail_everywhere(hurt, Run("error at calls", len(chosen)), chosen)


@needs_strace
@pytest.mark.torture
def test_database_malformed_after_kill_at_every_call(zygote: Zygote, tmp_path: Path) -> None:
    hurt = Hurt(zygote, tmp_path)
    run = Run("kill-every-call", 0, torture_folder())
    kill_everywhere(hurt, run, run.plan(lambda: all_kills(hurt)))


@needs_strace
@pytest.mark.torture
def test_phantom_row_after_a_failure_of_every_call(zygote: Zygote, tmp_path: Path) -> None:
    hurt = Hurt(zygote, tmp_path)
    run = Run("error-every-call", 0, torture_folder())
    fail_everywhere(hurt, run, run.plan(lambda: all_errors(hurt)))
