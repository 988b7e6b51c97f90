"""Entries from standard input: no prompt, and the first error ends it."""

from __future__ import annotations

from collections.abc import Iterable

from kvdb.errors import KvdbError
from kvdb.shell.session import Leave, Session, ShellError
from kvdb.shell.split import Entry, Splitter


def run_script(session: Session, lines: Iterable[str]) -> None:
    """Run entries as they come. The first error is raised with the line where its entry began."""
    splitter = Splitter()
    try:
        for line in lines:
            for entry in splitter.feed(line):
                _run(session, entry)
        for entry in splitter.finish():
            _run(session, entry)
    except UnicodeDecodeError as error:
        raise ShellError("The script is not UTF-8 text.") from error
    except Leave:
        return


def _run(session: Session, entry: Entry) -> None:
    try:
        session.run(entry)
    except KvdbError as error:
        error.args = (f"Line {entry.line}: {error}",)
        raise
