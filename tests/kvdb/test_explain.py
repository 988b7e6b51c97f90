"""What explanations are read from: texts at their first difference, runs of tokens, parts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb.errors import UsageError
from kvdb.explain import Explanation, explain_request, explain_tokens, texts
from kvdb.explain.case import RUN, Case, Neighbour, in_common_runs
from kvdb.explain.causes import Sides, find_cause
from kvdb.explain.keyspaces import KeySpace
from kvdb.identity import ModelIdentity, as_tokens
from kvdb.segments import Segment, load_segments
from kvdb.store import Store
from tests.support import open_namespace, put_all, random_tokens

AFTER = " and the text goes on as before."


@pytest.mark.parametrize(
    ("mine", "theirs", "code"),
    [
        ("2026-11-30", "2026-12-01", "timestamp"),
        ("2026-11-30T10:22:01Z", "2026-11-30T10:22:02Z", "timestamp"),
        ("10:22", "11:07", "timestamp"),
        ("Monday", "Tuesday", "timestamp"),
        ("1796034121", "1796034177", "timestamp"),
        (
            "3f2a9c81-77b0-4c1d-9e55-0123456789ab",
            "91bb04de-11c2-4c1d-9e55-0123456789ab",
            "unique_id",
        ),
        ("req_8f3a01c9", "req_11c0ffee", "unique_id"),
        ("call-7", "call-8", "unique_id"),
        ("42", "43", "unique_id"),
        ("Paris", "Rome", None),
        ("defaced", "effaced", None),
        ("2026-11-30", "someday", None),
    ],
)
def test_volatile_words(mine: str, theirs: str, code: str | None) -> None:
    assert texts.volatile(f"It is {mine}{AFTER}", f"It is {theirs}{AFTER}") == code
    # Where the rest is another one too, the word is not what is wrong.
    assert texts.volatile(f"It is {mine}{AFTER}", f"It is {theirs}, of all of them.") is None


@pytest.mark.parametrize(
    ("mine", "theirs", "only"),
    [
        ("a b c d e f g", "a  b c d e f g", True),
        ("line one\nline two", "line one\r\nline two", True),
        ("the end ", "the end", True),
        ("same words here", "same work here", False),
        ("a b and so on", "ab and other things", False),
    ],
)
def test_whitespace(mine: str, theirs: str, only: bool) -> None:
    assert texts.only_whitespace(mine, theirs) == only


keys = st.text('abcxyz"\\{}[]:, ', min_size=1, max_size=6)
documents = st.recursive(
    st.none() | st.integers() | st.text('ab"\\{}[]:,', max_size=6),
    lambda inner: (
        st.dictionaries(keys, inner, min_size=1, max_size=3) | st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(keys, min_size=1, max_size=4), documents, st.booleans())
def test_the_path_to_a_value(path: list[str], beside: object, spaced: bool) -> None:
    """A marked value deep in a document, behind any neighbours: its path is told."""
    document: object = "MARK"
    for key in reversed(path):
        document = {f"_{key}": beside, key: document}
    separators = (", ", ": ") if spaced else (",", ":")
    text = json.dumps(document, separators=separators, ensure_ascii=False)
    at = text.index('"MARK"')
    quoted = [json.dumps(key, ensure_ascii=False)[1:-1] for key in path]
    for offset in (0, 1, 3):
        assert texts.json_path(text, at + offset) == quoted


@given(
    st.lists(st.integers(0, 5), max_size=80),
    st.lists(st.integers(0, 5), max_size=80),
)
def test_tokens_in_long_common_runs(a: list[int], b: list[int]) -> None:
    expected = set()
    runs = {tuple(b[i : i + RUN]) for i in range(len(b) - RUN + 1)}
    for i in range(len(a) - RUN + 1):
        if tuple(a[i : i + RUN]) in runs:
            expected |= set(range(i, i + RUN))
    found = in_common_runs(as_tokens(a), as_tokens(b))
    assert set(np.flatnonzero(found)) == expected


def sides(prompt: str, stored: str, at: int, answer_from: int) -> Sides:
    """Characters as tokens; the stored chat's prompt ends where its answer begins."""
    space = KeySpace(1, bytes(32), "m", ModelIdentity("w", "c"), 16)

    def tokens(text: str) -> np.ndarray:
        return as_tokens(list(map(ord, text)))

    case = Case(
        space,
        tokens(prompt),
        [],
        [
            Segment("message", answer_from, role="user", index=0, digest="a"),
            Segment("message", len(prompt), role="assistant", index=1, digest="b"),
        ],
        lambda ids: "".join(map(chr, ids)),
        0,
        None,
        0,
        0,
    )
    parts = [Segment("message", answer_from, role="user", index=0, digest="a")]
    return Sides(case, Neighbour(tokens(stored), at, bytes(32), 7, answer_from, parts))


@pytest.mark.parametrize(
    ("answer", "sent", "code"),
    [
        ("<think>hm, hm</think>\n\nYes it is so.", "Yes it is so.", "rerendered"),
        ("Yes  it is so, I think.", "Yes it is so, I think.", "whitespace"),
        ("Yes it is so.", "No, it is another thing.", "answer_changed"),
    ],
)
def test_answers_that_come_back_otherwise(answer: str, sent: str, code: str) -> None:
    question = "user: is it so? "
    prompt, stored = question + sent, question + answer
    at = next(i for i, (a, b) in enumerate(zip(prompt, stored, strict=False)) if a != b)
    cause = find_cause(sides(prompt, stored, at, len(question)))
    assert (cause.code, cause.where) == (code, "message 2 (assistant)")


def test_without_parts_and_decoder(store: Store) -> None:
    """The core alone: token ids in, token ids out."""
    namespace = open_namespace(store)
    stored = random_tokens(1, 100)
    put_all(store, namespace, stored)
    prompt = stored.copy()
    prompt[70] += 1
    found = explain_tokens(store, namespace, prompt)
    assert (found.code, found.differing_token, found.hit_tokens) == ("text_changed", 70, 70)
    assert found.prompt_text == " ".join(
        f"»{token}«" if n == 4 else str(token) for n, token in enumerate(prompt[66:75])
    )
    assert found.saving_tokens == 29
    assert found.as_dict()["differing_token"] == 70
    assert any(line.startswith("Why: ") for line in found.lines())


@pytest.mark.parametrize(
    "text",
    [
        "[" * 50_000,
        '[{"kind": "message", "end": 1e99}, {"kind": 5, "end": 3}, {"end": 3}, null, [], 7]',
        '[{"kind": "message", "end": 3, "digest": ["a"]}, {"kind": "tool", "end": 3, "name": 7}]',
        '[{"kind": "message", "end": 99999999999999999999}, {"kind": "message", "end": -1}]',
        '[{"kind": "message", "end": 3, "index": "x"}, {"kind": "message", "end": true}]',
    ],
)
def test_foreign_segments_are_left_out(text: str) -> None:
    assert load_segments(text) == []


def test_wrong_questions(store: Store) -> None:
    namespace = open_namespace(store)
    for tokens in ([], [-1], [1.5]):
        with pytest.raises(UsageError):
            explain_tokens(store, namespace, tokens)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        explain_request(store, 1)


def test_lines_are_printable() -> None:
    evil = "\x1b]0;evil\x07\n"
    found = Explanation(3, 1, "x", f"It is {evil}.", "", 1, f"tool {evil}", evil, "\u202eb»c«")
    assert all(line.isprintable() for line in found.lines())
