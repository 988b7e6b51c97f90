"""SQL functions of kvdb's own tools."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb import functions
from kvdb.driver import sqlite3
from kvdb.errors import QueryError
from kvdb.sandbox import run_sql

NOW = 1_800_000_000_000_000


def ask(expression: str, **options: Any) -> Any:
    connection = sqlite3.connect(":memory:")
    try:
        return run_sql(connection, f"SELECT {expression}", now_us=NOW, **options).rows[0][0]
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("tokens(x'0100000000010000')", "[1,256]"),
        ("tokens(x'')", "[]"),
        ("tokens(NULL)", None),
        ("token_text(x'01000000')", None),
        ("human_bytes(999)", "999 B"),
        ("human_bytes(1500)", "1.5 kB"),
        ("human_bytes(-2e12)", "-2.0 TB"),
        ("human_bytes(9e999)", "inf TB"),
        ("human_bytes(NULL)", None),
        (f"ago({NOW} - 59999999)", "59 s ago"),
        (f"ago({NOW} - 60000000)", "1 min ago"),
        (f"ago({NOW} + 7200000000)", "in 2 h"),
        (f"ago({NOW} - 3 * 86400000000)", "3 d ago"),
        (f"ago({NOW})", "0 s ago"),
        ("ago(-9223372036854775808)", "106772824 d ago"),
        ("ago('yesterday')", None),
    ],
)
def test_values(expression: str, value: Any) -> None:
    assert ask(expression) == value


@pytest.mark.parametrize("expression", ["tokens('text')", "tokens(x'010203')", "token_text(7)"])
def test_what_is_no_token_blob_is_said(expression: str) -> None:
    with pytest.raises(QueryError, match="not a blob of 4 bytes a token"):
        ask(expression)


def test_token_text_gets_namespace_and_ids() -> None:
    seen: list[tuple[int | None, list[int]]] = []

    def text(namespace: int | None, ids: Any) -> str | None:
        seen.append((namespace, list(ids)))
        return "text" if namespace == 7 else None

    assert ask("token_text(x'0100000002000000', 7)", token_text=text) == "text"
    assert ask("token_text(x'03000000')", token_text=text) is None
    assert seen == [(7, [1, 2]), (None, [3])]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_are_those_of_the_blob(ids: list[int]) -> None:
    blob = array("I", ids).tobytes()
    assert list(functions.token_ids(blob) or ()) == ids


def test_text_that_is_not_utf8_is_shown_as_far_as_it_is() -> None:
    assert ask("CAST(x'41ff42' AS TEXT)") == "A\ufffdB"
