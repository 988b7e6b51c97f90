"""How deep JSON is nested, against a parser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.http.bodies import check_nesting, nesting
from kvdb.errors import UsageError

VALUES = st.recursive(
    st.none() | st.integers() | st.text() | st.text(alphabet='\\"[]{}n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


def depth(value: Any) -> int:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth, inner), default=0)
    return 0


@given(VALUES, st.booleans())
def test_nesting_is_what_a_parser_finds(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert nesting(body) == depth(value)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b"[" * 65 + b"]" * 65,
        b'{"a":' * 65 + b"1" + b"}" * 65,
        # A parser stops at the first thing that is wrong, but it gets there by recursion.
        b"[" * 100_000 + b'"',
        b'["\\\\",' + b"[" * 100_000,
        b'["\\"",' + b"[" * 100_000,
        ("[" * 100_000).encode("utf-16"),
        ('["\u2222' + "[" * 100_000).encode("utf-16-le"),
    ],
)
def test_deep_json_is_refused(body: bytes) -> None:
    with pytest.raises(UsageError):
        check_nesting(body, 64)
