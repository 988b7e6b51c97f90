"""How two texts differ at their first difference: whitespace, a time, an id, the order of keys."""

from __future__ import annotations

import re
from dataclasses import dataclass

WINDOW = 4000
# Whoever changes a word only goes on with the same text for at least this many characters.
RESUMES = 8
WORD = re.compile(r"[\w:.+/\-]")
TIMESTAMP = re.compile(
    r"""(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}          # 2026-11-30
        ([T_]?\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?(Z|[+-]\d{2}:?\d{2})?)?
      |\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}          # 30.11.2026
      |\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?(Z|[ap]m)?
      |\d{10}(\d{3})?(\.\d+)?                    # seconds or milliseconds since 1970
      |\d{8}T\d{4,6}Z?
      |(mon|tues|wednes|thurs|fri|satur|sun)day
      |jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?|aug(ust)?|sep(tember)?
      |oct(ober)?|nov(ember)?|dec(ember)?
    )[.,:]?""",
    re.VERBOSE | re.IGNORECASE,
)
UNIQUE_ID = re.compile(
    r"""([\w\-]*[._:/\-])?(
        [0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}   # a UUID
      |(?=\w*\d)[0-9a-f]{7,}
      |(?=[\w\-]*\d)(?=[\w\-]*[a-z])[\w\-]{8,}
      |\d+
    )[.,:]?""",
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Difference:
    """The character at which two texts part, and the words around it."""

    at: int
    mine: str
    theirs: str


def first_difference(prompt: str, stored: str) -> Difference:
    length = min(len(prompt), len(stored))
    at = next((i for i in range(length) if prompt[i] != stored[i]), length)
    return Difference(at, _word(prompt, at)[0], _word(stored, at)[0])


def volatile(prompt: str, stored: str) -> str | None:
    """``timestamp`` or ``unique_id`` when the texts first differ in nothing but one such word and
    then go on alike; else None."""
    at = first_difference(prompt, stored).at
    mine, my_end = _word(prompt, at)
    theirs, their_end = _word(stored, at)
    if not mine or not theirs or not _go_on_alike(prompt[my_end:], stored[their_end:]):
        return None
    for code, pattern in (("timestamp", TIMESTAMP), ("unique_id", UNIQUE_ID)):
        if pattern.fullmatch(mine) and pattern.fullmatch(theirs):
            return code
    return None


def only_whitespace(prompt: str, stored: str) -> bool:
    """Do the texts part at whitespace, and go on alike without it?"""
    at = first_difference(prompt, stored).at
    mine, theirs = prompt[at : at + WINDOW], stored[at : at + WINDOW]
    if not (mine[:1].isspace() or theirs[:1].isspace()):
        return False
    return _go_on_alike("".join(mine.split()), "".join(theirs.split()))


def same_letters(prompt: str, stored: str) -> bool:
    """Do the texts hold the same characters in another order?"""
    return prompt != stored and sorted(prompt) == sorted(stored)


def looks_like_json(text: str) -> bool:
    return '":' in text or '" :' in text


def json_path(text: str, at: int) -> list[str]:
    """The keys of the objects around position ``at`` of a text that holds JSON, outermost first."""
    open_: list[str | None] = []
    key: str | None = None
    quote: int | None = None  # where the string that is open began
    value = escaped = False  # behind a colon; behind a backslash
    for position, char in enumerate(text[:at]):
        if quote is not None:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                if not value:
                    key = text[quote:position]
                quote = None
        elif char == '"':
            quote = position + 1
        elif char == ":":
            value = True
        elif char in "{[":
            open_.append(key if value else None)
            key, value = None, False
        elif char in "}]":
            key, value = None, False
            if open_:
                open_.pop()
        elif char == ",":
            key, value = None, False
    return [name for name in (*open_, key if value else None) if name]


def _word(text: str, at: int) -> tuple[str, int]:
    """The word around position ``at``, and where it ends."""
    start = end = min(at, len(text))
    while start > 0 and WORD.match(text[start - 1]):
        start -= 1
    while end < len(text) and WORD.match(text[end]):
        end += 1
    return text[start:end], end


def _go_on_alike(a: str, b: str) -> bool:
    length = min(len(a), len(b), RESUMES * 4)
    if length < RESUMES:
        return a[:length] == b[:length] and (len(a) == len(b) or length > 0)
    return a[:length] == b[:length]
