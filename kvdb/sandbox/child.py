"""Statements in a child process: the only way to stop one that SQLite cannot interrupt.

The child runs ``python -m kvdb.sandbox`` (or another module that calls :func:`serve`). It says one
line when it is ready, then takes one JSON request a line, and answers with a line that tells how
the statement ended and a line for each row. It is not forked: the parent may have threads, MLX and
connections of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from kvdb import errors
from kvdb.driver import INDEX_NAME, Database
from kvdb.errors import KvdbError, MissingParameter, QueryError
from kvdb.functions import TokenText
from kvdb.sandbox.memory import MEMORY_BYTES, bounded_memory, cap_process_memory
from kvdb.sandbox.statement import (
    DEFAULT_DEADLINE_SECONDS,
    DEFAULT_LIMIT,
    NEEDS_MEMORY,
    STOPPED,
    Parameters,
    SqlResult,
    run_sql,
)

# From the deadline, or from an interrupt, to the kill.
GRACE_SECONDS = 0.25
MODULE = "kvdb.sandbox"
INTERRUPTED = "KeyboardInterrupt"


def run_in_child(
    path: Path | str,
    sql: str,
    params: Parameters = (),
    *,
    limit: int = DEFAULT_LIMIT,
    deadline: float = DEFAULT_DEADLINE_SECONDS,
    memory: int = MEMORY_BYTES,
) -> SqlResult:
    """Run one read-only statement on the store at ``path`` in a process of its own, which is
    killed when it does not end in time. Starting it takes about 0.2 s, which do not count.

    Raises QueryError in one sentence, StoreMissing and the like when the index cannot be opened.
    The caller has the store open, or else nobody keeps it from being rebuilt meanwhile.
    """
    with SandboxProcess(path, memory=memory) as process:
        return process.run(sql, params, limit=limit, deadline=deadline)


class SandboxProcess:
    """A child that runs statements one after another, and is started anew when one had to be
    killed. For one thread; only :meth:`interrupt` may come from a signal or another thread."""

    def __init__(
        self, path: Path | str, *, memory: int = MEMORY_BYTES, module: str = MODULE
    ) -> None:
        self._path, self._memory, self._module = Path(path), memory, module
        # In a folder that cannot be written the child may work on a copy of the index, which it
        # leaves behind when it is killed.
        self._temp: tempfile.TemporaryDirectory[str] | None = None
        if not os.access(self._path, os.W_OK):
            self._temp = tempfile.TemporaryDirectory(prefix="kvdb-sandbox-")
        self._process: subprocess.Popen[str] | None = None
        self._ready = self._running = self._interrupted = self._late = False
        self._turn = 0  # a statement's number: a late kill must not hit the next one

    def start(self) -> None:
        """Start the child now, so that the first statement need not wait for it."""
        if self._process is not None:
            return
        root = str(Path(__file__).parent.parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module, str(self._path), str(self._memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="ascii",
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                **({} if self._temp is None else {"TMPDIR": self._temp.name}),
            },
            start_new_session=True,  # the terminal's ^C goes to the parent, which decides
        )

    def run(
        self,
        sql: str,
        params: Parameters = (),
        *,
        limit: int = DEFAULT_LIMIT,
        deadline: float = DEFAULT_DEADLINE_SECONDS,
    ) -> SqlResult:
        """See :func:`run_in_child`. Raises KeyboardInterrupt after :meth:`interrupt`."""
        self._interrupted = self._late = False
        self._turn += 1
        request = {"sql": sql, "params": _packed(params), "limit": limit, "deadline": deadline}
        try:
            result = self._exchange(json.dumps(request) + "\n", deadline + GRACE_SECONDS)
        except (BrokenPipeError, EOFError) as error:
            self._reap()
            if self._interrupted:
                raise KeyboardInterrupt from error
            if self._late:
                raise QueryError(STOPPED.format(deadline)) from error
            raise QueryError(NEEDS_MEMORY) from error  # it gave up, or the kernel ended it
        except QueryError:
            raise
        except BaseException:
            self._reap()  # what it would still answer is nobody's
            raise
        if result is None:
            raise KeyboardInterrupt
        return result

    def _exchange(self, request: str, seconds: float) -> SqlResult | None:
        requests, answers = self._pipes()
        timer = threading.Timer(seconds, self._kill_late)
        timer.daemon = True
        try:
            self._running = True
            timer.start()
            if self._interrupted:
                return None
            requests.write(request)
            requests.flush()
            return _receive(answers)
        finally:
            self._running = False
            timer.cancel()
            if self._late:
                self._reap()

    def interrupt(self) -> None:
        """End the running statement: politely, and soon by force."""
        self._interrupted = True
        process = self._process
        if process is None or not self._running:
            return
        process.send_signal(signal.SIGINT)
        timer = threading.Timer(GRACE_SECONDS, self._kill_interrupted, (process, self._turn))
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """End the child. Idempotent."""
        self._reap()
        if self._temp is not None:
            self._temp.cleanup()

    def __enter__(self) -> SandboxProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        """Of a child that is ready. Raises what kept it from opening the index."""
        self.start()
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise EOFError
        if not self._ready:
            _receive(process.stdout)
            self._ready = True
        return process.stdin, process.stdout

    def _kill_late(self) -> None:
        process = self._process
        if self._running and process is not None:
            self._late = True
            process.kill()

    def _kill_interrupted(self, process: subprocess.Popen[str], turn: int) -> None:
        if self._running and self._turn == turn:
            process.kill()

    def _reap(self) -> None:
        process, self._process = self._process, None
        self._ready = False
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it did not take is lost with it
                    pipe.close()


def serve(arguments: list[str], token_text: TokenText | None = None) -> None:
    """What the child does, until its input ends: ``arguments`` are the store and the memory it may
    use in bytes."""
    interrupted = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    memory = int(arguments[1])
    cap_process_memory(memory)
    database = Database(Path(arguments[0]) / INDEX_NAME, writer_lock=None)
    try:
        database.open()
        _answer({"columns": [], "rows": 0, "capped": False})
    except KvdbError as error:
        _answer(_failure(error))
        return
    for line in sys.stdin:
        interrupted.clear()
        request = json.loads(line)
        try:
            with bounded_memory(memory), contextlib.closing(database.sandboxed()) as connection:
                result = run_sql(
                    connection,
                    request["sql"],
                    _unpacked(request["params"]),
                    limit=request["limit"],
                    deadline=request["deadline"],
                    token_text=token_text,
                    interrupted=interrupted.is_set,
                )
        except KvdbError as error:
            _answer(_failure(error))
        except KeyboardInterrupt:
            _answer({"error": INTERRUPTED})
        else:
            header = {"columns": result.columns, "rows": len(result.rows), "capped": result.capped}
            _answer(header, *map(_packed, result.rows))
            del result


def _failure(error: KvdbError) -> dict[str, str]:
    """What the parent needs to raise it again."""
    argument = error.name if isinstance(error, MissingParameter) else str(error)
    return {"error": type(error).__name__, "message": argument}


def _answer(*lines: object) -> None:
    for line in lines:
        sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _receive(answers: IO[str]) -> SqlResult | None:
    """None for an interrupted statement. Raises EOFError when the child has gone, and what the
    child raised."""
    header = _line(answers)
    if header.get("error") == INTERRUPTED:
        return None
    if "error" in header:
        error: KvdbError = getattr(errors, header["error"])(header["message"])
        raise error
    rows = [tuple(_unpacked(_line(answers))) for _ in range(header["rows"])]
    return SqlResult(tuple(header["columns"]), rows, header["capped"])


def _line(answers: IO[str]) -> Any:
    line = answers.readline()
    if not line.endswith("\n"):
        raise EOFError
    return json.loads(line)


def _packed(values: Any) -> Any:
    """Rows and parameters as JSON, which has no bytes."""
    if isinstance(values, Mapping):
        return {name: _packed_value(value) for name, value in values.items()}
    return [_packed_value(value) for value in values]


def _packed_value(value: Any) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _unpacked(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _unpacked_value(value) for name, value in values.items()}
    return [_unpacked_value(value) for value in values]


def _unpacked_value(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
