"""Text into entries: SQL statements that end with ``;``, and lines that begin with ``.``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# What may hold a semicolon that ends nothing; an open one reaches to the end of the text.
TOKENS = re.compile(
    r"""
    (?P<open> ' (?:[^']|'')* \Z | " (?:[^"]|"")* \Z | ` (?:[^`]|``)* \Z | \[ [^\]]* \Z
        | /\* (?:(?!\*/).)* \Z )
    | (?P<quoted> ' (?:[^']|'')* ' | " (?:[^"]|"")* " | ` (?:[^`]|``)* ` | \[ [^\]]* \] )
    | (?P<comment> -- [^\n]* | /\* (?:(?!\*/).)* \*/ )
    | (?P<end> ; )
    | (?P<space> \s+ )
    | (?P<other> [^'"`\[/;\s-]+ | . )
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A statement without its semicolon, or a command with its dot, and the line it began on."""

    text: str
    line: int

    @property
    def is_command(self) -> bool:
        return self.text.startswith(".")


class Splitter:
    """Takes lines and gives entries as soon as they are complete."""

    def __init__(self) -> None:
        self._pending = ""
        self._empty = True
        self._line = self._began = 1

    def feed(self, line: str) -> Iterator[Entry]:
        """What this line completes."""
        number, self._line = self._line, self._line + 1
        if self._empty:
            self._pending, self._began = "", number
            if line.lstrip().startswith("."):
                yield Entry(line.strip().rstrip(";").rstrip(), number)
                return
        self._pending += line
        if not self._empty and ";" not in line:
            return
        statements, self._pending, self._empty = cut(self._pending)
        for text, skipped, lines in statements:
            if text:
                yield Entry(text, self._began + skipped)
            self._began += lines
        if self._pending.lstrip().startswith("."):  # behind a statement on its line
            yield Entry(self._pending.strip().rstrip(";").rstrip(), number)
            self._pending, self._empty = "", True

    def finish(self) -> Iterator[Entry]:
        """The last statement, which needs no semicolon."""
        if not self._empty:
            blank = len(self._pending) - len(self._pending.lstrip())
            skipped = self._pending[:blank].count("\n")
            yield Entry(self._pending.strip(), self._began + skipped)


def cut(text: str) -> tuple[list[tuple[str, int, int]], str, bool]:
    """(statements; the rest; is the rest only space and comments?). With each statement the lines
    skipped before it and those up to the next one; one without content is ''."""
    statements: list[tuple[str, int, int]] = []
    start, empty = 0, True
    for match in TOKENS.finditer(text):
        if match.lastgroup == "end":
            piece = text[start : match.start()]
            blank = piece[: len(piece) - len(piece.lstrip())]
            content = "" if empty else piece.strip()
            statements.append((content, blank.count("\n"), piece.count("\n")))
            start, empty = match.end(), True
        elif match.lastgroup not in ("space", "comment"):
            empty = False
    return statements, text[start:], empty


def is_complete(text: str) -> bool:
    """Can what was typed be run? A command, nothing, or statements that all end."""
    if text.lstrip().startswith(".") or not text.strip():
        return True
    statements, _, empty = cut(text)
    return bool(statements) and empty


def inside_literal(text: str) -> bool:
    """Does ``text`` end in a string, a quoted name or a comment that is still open?"""
    kind, piece = None, ""
    for match in TOKENS.finditer(text):
        kind, piece = match.lastgroup, match[0]
    return kind == "open" or (kind == "comment" and piece.startswith("--"))
