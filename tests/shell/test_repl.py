"""The prompt, with keys from a pipe; and the program in a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from kvdb.shell import repl
from kvdb.shell.schema import LiveSchema
from kvdb.shell.session import Session
from tests.cli.conftest import ROOT

ENDLESS = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t;"


def typed(session: Session, keys: str, history: Path) -> None:
    """Type ``keys`` at the prompt until it is left."""
    with create_pipe_input() as pipe:
        pipe.send_text(keys)
        prompt = repl.make_prompt(
            LiveSchema(session.store), repl.open_history(history), input=pipe, output=DummyOutput()
        )
        repl.interact(session, prompt)


def test_statements_may_have_many_lines(session: Session, shown: list[str], tmp_path: Path) -> None:
    session.mode = "csv"
    history = tmp_path / "state/history"
    typed(session, "SELECT 1 AS a,\r2 AS b\r;\rSELECT 3 AS c; SELECT 4 AS d;\r\x04", history)
    assert shown == ["a,b\n1,2\n", "c\n3\n", "d\n4\n"]
    assert history.stat().st_mode & 0o777 == 0o600
    assert "SELECT 3 AS c" in history.read_text()


def test_keys_at_the_prompt(
    session: Session,
    shown: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """^C gives the line up, an error goes on, a command needs no semicolon."""
    session.mode = "csv"
    keys = "SELECT 9\x03.nope\r\r;\rSELECT 1 AS a;\r.quit\rSELECT 2;\r"
    typed(session, keys, tmp_path / "h")
    assert shown == ["a\n1\n"]
    assert "There is no command .nope" in capsys.readouterr().err


def test_a_history_that_cannot_be_kept_is_no_obstacle(
    session: Session, shown: list[str], tmp_path: Path
) -> None:
    session.mode = "csv"
    (tmp_path / "file").write_text("")
    typed(session, "SELECT 1 AS a;\r\x04", tmp_path / "file/history")
    assert shown == ["a\n1\n"]


class Terminal:
    """``kvdb shell`` in a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master = process, master
        self.seen = b""

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str, seconds: float = 30) -> str:
        """What came up to ``pattern``."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern.encode(), self.seen, re.DOTALL)) is None:
            assert time.monotonic() < end, self.seen[-2000:]
            if select.select([self._master], [], [], 0.5)[0]:
                try:
                    self.seen += os.read(self._master, 65536)
                except OSError:  # it has gone
                    self.seen += b"<gone>"
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before.decode(errors="replace")


@contextmanager
def terminal(store: Path, home: Path, columns: int) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "KVDB_STORE": str(store),
        "TERM": "xterm",
        "PAGER": "cat",
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "kvdb", "shell"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.mark.parametrize("columns", [20, 100])
def test_in_a_terminal(lived_in: Path, tmp_path: Path, columns: int) -> None:
    """^C ends a statement and not the shell, hostile names do no harm, ^D leaves with 0."""
    with terminal(lived_in, tmp_path, columns) as shell:
        shell.expect(">")
        shell.send("SELECT count(*), model FROM block_usage GROUP BY model;\r")
        assert "\x1b[31m\x9b" not in shell.expect(r"evil\\x1b")
        shell.send(ENDLESS + "\r")
        time.sleep(0.7)  # whenever it comes, it must not reach the shell
        os.kill(shell.process.pid, signal.SIGINT)
        shell.expect("Interrupted", 5)
        for number in range(12):  # at whatever moment it comes
            shell.send((".hits\r", ".miss 3\r", "SELECT 1;\r")[number % 3])
            time.sleep(0.04 * number)
            os.kill(shell.process.pid, signal.SIGINT)
        time.sleep(0.5)
        shell.send("\x03SELECT 6 * 7;\r")
        shell.expect("42")
        shell.expect(">")
        shell.send("\x04")
        shell.expect("<gone>")
        assert shell.process.wait(10) == 0
