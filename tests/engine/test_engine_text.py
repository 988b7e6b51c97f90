"""Stop texts in a stream of pieces: nothing of them is emitted, nothing else is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.text import StopFinder

pieces = st.lists(st.text("ab", max_size=4), max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(pieces, stops)
def test_the_text_before_the_first_stop_is_emitted(parts: list[str], ends: list[str]) -> None:
    finder = StopFinder(ends)
    out, stopped, seen = "", False, ""
    for piece in parts:
        seen += piece
        text, stopped = finder.feed(piece)
        out += text
        assert not any(end in out for end in ends)
        if stopped:
            break
    out += "" if stopped else finder.rest()
    found = [seen.index(end) for end in ends if end in seen]
    assert stopped == bool(found)
    assert out == (seen[: min(found)] if found else seen)


def test_no_stop_holds_nothing_back() -> None:
    assert StopFinder(()).feed("abc") == ("abc", False)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    finder = StopFinder(("STOP",))
    assert finder.feed("xST") == ("x", False)
    assert finder.feed("y") == ("STy", False)
    assert finder.feed("ST") == ("", False)
    assert finder.rest() == "ST"
