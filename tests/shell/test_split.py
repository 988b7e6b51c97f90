"""Text into statements and commands."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb.driver import sqlite3
from kvdb.shell.split import Entry, Splitter, cut, inside_literal, is_complete

QUOTED = "a ';' \"x;\" `y;` [z;] /* ; */ -- ;\n b"


def split(text: str) -> list[tuple[str, int]]:
    splitter = Splitter()
    found: list[Entry] = []
    for line in text.splitlines(keepends=True):
        found += splitter.feed(line)
    return [(entry.text, entry.line) for entry in (*found, *splitter.finish())]


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a; b;c", [("a", 1), ("b", 1), ("c", 1)]),
        ("a\n b\n;\nc;", [("a\n b", 1), ("c", 4)]),
        ("a; -- note\n.help\nb", [("a", 1), (".help", 2), ("b", 3)]),
        ("\n\n  a", [("a", 3)]),
        ("a; .tree\n.help\nb", [("a", 1), (".tree", 1), (".help", 2), ("b", 3)]),
        ("SELECT\n.5;", [("SELECT\n.5", 1)]),
        (".mode csv;\n", [(".mode csv", 1)]),
        (f"{QUOTED};", [(QUOTED, 1)]),
        ("'it''s; one';", [("'it''s; one'", 1)]),
        ("/* a\n;\n*/ b; c", [("/* a\n;\n*/ b", 1), ("c", 3)]),
        (";;\n ; -- nothing\n", []),
        ("'open;\nline", [("'open;\nline", 1)]),
    ],
)
def test_entries_and_the_lines_they_begin_on(text: str, entries: list[tuple[str, int]]) -> None:
    assert split(text) == entries


@given(st.text(alphabet="a;'\"`[]-/* \n", max_size=30))
def test_complete_is_what_sqlite_calls_complete(text: str) -> None:
    """But for text without content, which is complete here: there is nothing to wait for."""
    statements, _, empty = cut(text)
    assert (bool(statements) and empty) == bool(sqlite3.complete_statement(text))
    assert is_complete(text) == (not text.strip() or bool(sqlite3.complete_statement(text)))


def test_hostile_text_is_split_in_time() -> None:
    started = time.monotonic()
    for text in ("'" * 100_001, "/*" * 50_000, "-" * 100_000, "';" * 50_000, "[" * 100_000):
        cut(text)
        inside_literal(text)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("text", "inside"),
    [("a 'b", True), ("a 'b' ", False), ("-- a", True), ("-- a\n", False), ("/* a", True)],
)
def test_inside_a_literal(text: str, inside: bool) -> None:
    assert inside_literal(text) == inside
