"""What the shell does with an entry, whoever typed it: statements, modes, results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import click

from kvdb.cli import terminal
from kvdb.cli.interrupts import noted_interrupts
from kvdb.cli.output import Format, rendered
from kvdb.errors import KvdbError, MissingParameter, QueryError
from kvdb.sandbox import SandboxProcess, SqlResult
from kvdb.shell.split import Entry
from kvdb.store import Store

MODES: Mapping[str, Format | None] = {
    "table": Format(table=True),
    "lines": None,
    "json": Format(),
    "nl": Format(nl=True),
    "csv": Format(csv=True),
    "tsv": Format(tsv=True),
    "markdown": Format(fmt="github"),
    "box": Format(fmt="rounded_outline"),
}


class ShellError(KvdbError):
    """A command of the shell is unknown, or was given what it cannot use."""


class Leave(Exception):
    """The user wants to go."""


class Runner(Protocol):
    """Runs statements: :class:`InterruptibleRunner`."""

    def run(
        self, sql: str, params: Any = (), *, limit: int = 1000, deadline: float = 10.0
    ) -> SqlResult: ...


@dataclass
class Session:
    """The state of one shell.

    ``show`` takes finished text, ``say`` what is said beside it. ``decoder`` gives what turns a
    namespace's tokens into text, where that is known. ``room`` is the terminal's width, None where
    the output is no terminal.
    """

    store: Store
    runner: Runner
    show: Callable[[str], None]
    say: Callable[[str], None]
    decoder: Callable[[int], Callable[[Sequence[int]], str] | None]
    room: Callable[[], int | None] = lambda: None
    interactive: bool = False
    mode: str = "table"
    timer: bool = False
    limit: int = 1000
    deadline: float = 10.0
    once: Path | None = None
    seconds: Callable[[], float] = time.monotonic
    _file: TextIO | None = field(default=None, init=False)

    def run(self, entry: Entry) -> None:
        """Run a statement or a command. Raises KvdbError, KeyboardInterrupt and Leave."""
        try:
            if entry.is_command:
                from kvdb.shell.commands import run_command

                run_command(self, entry.text)
            else:
                self._run_statement(entry.text)
        finally:
            if self._file is not None:
                self._file.close()
                self._file = self.once = None

    def _run_statement(self, sql: str) -> None:
        started = self.seconds()
        try:
            result = self.ask(sql)
        except MissingParameter as error:
            raise QueryError(f"{str(error)[:-1]}; write the value itself.") from error
        took = self.seconds() - started
        self.show_rows(result.columns, result.rows)
        count = f"{len(result.rows)} row{'' if len(result.rows) == 1 else 's'}"
        if result.capped:
            self.say(f"Only the first {count} are shown; .limit N shows more.")
        if self.timer:
            self.say(f"{count} in {took:.3f} s")

    def ask(self, sql: str, params: Any = (), *, limit: int | None = None) -> SqlResult:
        """Rows of one statement, within the session's limits."""
        most = self.limit if limit is None else limit
        return self.runner.run(sql, params, limit=most, deadline=self.deadline)

    def show_rows(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], mode: str | None = None
    ) -> None:
        """Rows in the session's mode, or another one, to where this result goes."""
        room = None if self.once is not None else self.room()
        output = MODES[mode or self.mode]
        if output is None:
            names = [terminal.visible(name) for name in columns]
            texts = [
                ["" if value is None else terminal.visible(_text(value)) for value in row]
                for row in rows
            ]
            self._put([terminal.records(names, texts, room), "\n"] if rows else [])
        elif output.table and not rows and self.interactive and self.once is None:
            self.say("No rows.")
        else:
            self._put(rendered(columns, rows, output, room=room))

    def show_record(self, columns: Sequence[str], row: Sequence[Any]) -> None:
        """One row: as lines, unless the mode is for programs."""
        self.show_rows(columns, [row], "lines" if self.mode == "table" else None)

    def show_text(self, text: str) -> None:
        """Lines of a command's own."""
        self._put([text if text.endswith("\n") else text + "\n"])

    def _put(self, pieces: Iterable[str]) -> None:
        if self.once is None:
            self.show("".join(pieces))
            return
        target = self.once
        try:
            if self._file is None:
                self._file = target.open("x", encoding="utf-8", errors="backslashreplace")
            self._file.writelines(pieces)
        except FileExistsError as error:
            self.once = None
            raise ShellError(f"{target} is there already; choose another name.") from error
        except OSError as error:
            self.once = None
            raise ShellError(f"{target} cannot be written: {error.strerror or error}.") from error


class InterruptibleRunner:
    """Runs statements in a child; ^C meanwhile ends the statement, and raises KeyboardInterrupt
    when it has ended. For the main thread."""

    def __init__(self, process: SandboxProcess) -> None:
        self._process = process

    def run(self, sql: str, params: Any = (), **limits: Any) -> SqlResult:
        with noted_interrupts(self._process.interrupt) as interrupted:
            result = self._process.run(sql, params, **limits)
        if interrupted():
            raise KeyboardInterrupt
        return result


def _text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def write_out(text: str) -> None:
    """To stdout; on a terminal nothing in ``text`` can steer it."""
    if terminal.is_terminal():
        text = terminal.visible(text, keep="\n\t")
    click.echo(text.encode("utf-8", "backslashreplace").decode(), nl=False)
