"""Text for terminals: inert, and no wider than they are."""

from __future__ import annotations

import json
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb.cli.output import Format, OutputError, rendered, table
from kvdb.cli.terminal import records, shorten, visible, width, wrapped

NASTY = "a\x1b[31m\x9b2J\0\r\n\t\x07\u202e\ud800😀é\x7f"
CELLS = st.one_of(
    st.none(), st.integers(-(10**6), 10**6), st.text(max_size=30), st.binary(max_size=9)
)


def test_what_steers_a_terminal_is_escaped() -> None:
    assert visible(NASTY) == r"a\x1b[31m\x9b2J\x00\r\n\t\x07\u202e\ud800😀é\x7f"
    assert visible("a\nb", keep="\n") == "a\nb"


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert not any(unicodedata.category(c) in ("Cc", "Cs") for c in visible(text))


@given(st.text(alphabet="aé😀界\u0301", max_size=20), st.integers(1, 12))
def test_cutting_keeps_within_the_columns(text: str, most: int) -> None:
    assert width(shorten(text, most)) <= max(most, 1)
    assert "".join(wrapped(text, most)) == text
    assert all(width(piece) <= max(most, 2) for piece in wrapped(text, most))


@given(
    st.lists(st.lists(CELLS, min_size=3, max_size=3), min_size=1, max_size=4),
    st.sampled_from([20, 33, 60, 200]),
)
def test_a_table_fits_every_terminal(rows: list[list[object]], room: int) -> None:
    text = table(["id", "a_rather_long_name", "x"], rows, room=room)
    assert max(map(width, text.splitlines()), default=0) <= room
    assert not re.search("[\0-\x09\x0b-\x1f\x7f-\x9f]", text)


def test_numbers_are_never_cut() -> None:
    rows = [[123456789012, "word " * 20, 1.25], [7, "short", 12345.5]]
    for room in (20, 30, 40, 80):
        text = table(["id", "text", "real"], rows, room=room)
        assert "123456789012" in text
        assert "12345.5" in text


def test_narrow_rows_become_lines() -> None:
    assert records(["id", "name"], [["1", "a" * 20]], 12) == "id    1\nname  aaaaaa\n" + (
        "      aaaaaa\n" * 2 + "      aa"
    )
    assert records(["id", "long_name"], [["1", "abc"]], 12) == "id: 1\nlong_name:\n  abc"


def test_json_stays_json_and_is_inert() -> None:
    for output in (Format(), Format(nl=True), Format(arrays=True, nl=True)):
        text = "".join(rendered(["a"], [[NASTY]], output))
        assert not re.search("[\0-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)
        assert _strings(json.loads(text)) == [NASTY]


def _strings(value: object) -> list[str]:
    if isinstance(value, dict):
        return [s for item in value.values() for s in _strings(item)]
    if isinstance(value, list):
        return [s for item in value for s in _strings(item)]
    return [str(value)]


def test_a_table_too_large_to_lay_out_says_what_to_do() -> None:
    with pytest.raises(OutputError, match="--csv or --nl"):
        table(["a"], [["x" * 1_000_000]] * 5)
