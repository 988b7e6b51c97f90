"""Completion from the live schema: commands, tables, columns, functions, keywords."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from kvdb import functions
from kvdb.sandbox.rules import FUNCTIONS
from kvdb.shell.commands import COMMANDS
from kvdb.shell.schema import Schema
from kvdb.shell.session import MODES
from kvdb.shell.split import inside_literal

WORD = re.compile(r"[\w.]*\Z")
AFTER_FROM = re.compile(
    r"\b(?:from|join|into|update)\s+(?:\w+(?:\s+(?:as\s+)?\w+)?\s*,\s*)*\w*\Z", re.IGNORECASE
)
KEYWORDS = """
    SELECT FROM WHERE JOIN LEFT ON USING GROUP BY HAVING ORDER LIMIT OFFSET WITH RECURSIVE AS
    UNION ALL DISTINCT AND OR NOT NULL IS IN LIKE BETWEEN CASE WHEN THEN ELSE END ASC DESC OVER
    PARTITION EXISTS CAST EXPLAIN QUERY PLAN VALUES FILTER
""".split()  # noqa: SIM905 - easier to read than quoted
ARGUMENTS = {
    ".mode": MODES,
    ".timer": ("on", "off"),
    ".help": tuple(name[1:] for name in COMMANDS),
}


class SqlCompleter(Completer):
    """Completes what is before the cursor. ``schema`` is asked each time."""

    def __init__(self, schema: Callable[[], Schema]) -> None:
        self._schema = schema

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        """Nothing for an empty word, unless Tab asked or a table must follow."""
        before = document.text_before_cursor
        if before.lstrip().startswith("."):
            yield from self._command(before.lstrip())
            return
        if inside_literal(before):
            return
        word = WORD.search(before)
        typed = word[0] if word else ""
        tables = AFTER_FROM.search(before) is not None
        if not typed and not tables and not complete_event.completion_requested:
            return
        yield from self._names(typed, before + document.text_after_cursor, tables)

    def _command(self, line: str) -> Iterator[Completion]:
        name, space, rest = line.partition(" ")
        if not space:
            for command, about in COMMANDS.items():
                if command.startswith(name.lower()):
                    yield Completion(command, -len(name), display_meta=about.help)
            return
        words = tuple(self._schema().tables) if name == ".schema" else ARGUMENTS.get(name, ())
        for word in words:
            if word.startswith(rest):
                yield Completion(word, -len(rest))

    def _names(self, typed: str, text: str, tables: bool) -> Iterator[Completion]:
        schema = self._schema()
        qualifier, dot, partial = typed.rpartition(".")
        if dot:
            table = schema.tables.get(_table_of(qualifier, text, schema))
            for column in () if table is None else table.columns:
                if column.name.startswith(partial.lower()):
                    yield Completion(column.name, -len(partial), display_meta=column.meaning)
            return
        low = typed.lower()
        for table in schema.tables.values():
            if table.name.startswith(low) and (typed or tables):
                yield Completion(table.name, -len(typed), display_meta=table.meaning or table.kind)
        if tables:
            return
        yield from _columns(typed, text, schema)
        if not typed:
            return
        about = {name.partition("(")[0]: meaning for name, meaning in functions.DOCUMENTED.items()}
        for name in sorted(FUNCTIONS, key=lambda name: (name not in about, name)):
            if name.startswith(low) and name[0].isalpha():
                meta = about.get(name, "function")
                yield Completion(f"{name}(", -len(typed), display=f"{name}()", display_meta=meta)
        for keyword in KEYWORDS:
            if keyword.lower().startswith(low):
                shown = keyword.lower() if typed.islower() else keyword
                yield Completion(shown, -len(typed))


def _columns(typed: str, text: str, schema: Schema) -> Iterator[Completion]:
    """Of the tables that ``text`` names, else of all."""
    used = [
        name for name in dict.fromkeys(re.findall(r"\w+", text.lower())) if name in schema.tables
    ]
    found: dict[str, str] = {}
    for table in used or schema.tables:
        for column in schema.tables[table].columns:
            found.setdefault(column.name, column.meaning or f"of {table}")
    for name, meaning in found.items():
        if name.startswith(typed.lower()):
            yield Completion(name, -len(typed), display_meta=meaning)


def _table_of(name: str, text: str, schema: Schema) -> str:
    """The table that ``name`` is, or is an alias of."""
    if name.lower() in schema.tables:
        return name.lower()
    alias = re.search(rf"(\w+)\s+(?:as\s+)?{re.escape(name)}\b", text, re.IGNORECASE)
    return alias[1].lower() if alias else ""
