"""Entries from standard input: no prompt, and the first error ends it."""

from __future__ import annotations

from collections.abc import Iterable

from kvdb.cli.interrupts import noted_interrupts
from kvdb.errors import KvdbError
from kvdb.sandbox import SandboxProcess
from kvdb.shell.session import Leave, Session, ShellError
from kvdb.shell.split import Entry, Splitter


def run_script(session: Session, process: SandboxProcess, lines: Iterable[str]) -> None:
    """Run entries as they come. Raises ShellError that names the line of the first that fails."""
    splitter = Splitter()
    try:
        for line in lines:
            for entry in splitter.feed(line):
                _run(session, process, entry)
        for entry in splitter.finish():
            _run(session, process, entry)
    except UnicodeDecodeError as error:
        raise ShellError("The script is not UTF-8 text.") from error
    except Leave:
        return


def _run(session: Session, process: SandboxProcess, entry: Entry) -> None:
    try:
        with noted_interrupts(process.interrupt) as interrupted:
            session.run(entry)
        if interrupted():
            raise KeyboardInterrupt
    except KvdbError as error:
        error.args = (f"Line {entry.line}: {error}",)
        raise
