"""SQL functions of kvdb's own tools, and a LIKE that cannot run away.

The store's views never use them: other SQLite tools do not have them.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from sys import byteorder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdb.driver import Connection

MAX_TOKEN_BYTES = 1 << 20
MAX_TEXT_CHARACTERS = 1_000_000
MAX_PATTERN_CHARACTERS = 1_000
# What one LIKE may cost: its pattern's length times its text's. About a third of a second.
MAX_LIKE_STEPS = 20_000_000

UNITS = ("B", "kB", "MB", "GB", "TB")
SPANS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))

# (namespace id or None where the statement names none, token ids) → their text, or None where no
# tokenizer is known.
TokenText = Callable[[int | None, Sequence[int]], str | None]

# Name with arguments → meaning, for help and completion.
DOCUMENTED: Mapping[str, str] = {
    "tokens(blob)": "token ids as a JSON array",
    "token_text(blob [, namespace_id])": "tokens as text; NULL where the tokenizer is not known",
    "human_bytes(n)": "bytes for people: 1.2 GB",
    "ago(us)": "a time in Unix microseconds as its distance from now: 3 min ago",
}


def register(
    connection: Connection,
    problems: list[str],
    *,
    now_us: int,
    token_text: TokenText | None = None,
) -> None:
    """Add the functions to a connection. What one refuses is appended to ``problems``, since
    SQLite says only that a function failed."""

    def add(name: str, arguments: int, function: Callable[..., Any]) -> None:
        def checked(*values: Any) -> Any:
            try:
                return function(*values)
            except ValueError as error:
                problems.append(f"{name}: {error}.")
                raise

        connection.create_function(name, arguments, checked, deterministic=True)

    def text_of(blob: Any, namespace_id: Any = None) -> str | None:
        ids = token_ids(blob)
        if ids is None or token_text is None:
            return None
        text = token_text(namespace_id if isinstance(namespace_id, int) else None, ids)
        return None if text is None else text[:MAX_TEXT_CHARACTERS]

    for arguments in (2, 3):
        add("like", arguments, like)
    add("tokens", 1, tokens)
    for arguments in (1, 2):
        add("token_text", arguments, text_of)
    add("human_bytes", 1, lambda n: human_bytes(n) if isinstance(n, int | float) else None)
    add("ago", 1, lambda us: ago(us, now_us) if isinstance(us, int | float) else None)


def token_ids(blob: Any) -> Sequence[int] | None:
    """The ids in a blob of little-endian u32. Raises ValueError for anything else but NULL."""
    if blob is None:
        return None
    if not isinstance(blob, bytes) or len(blob) % 4:
        raise ValueError("the argument is not a blob of 4 bytes a token")
    if len(blob) > MAX_TOKEN_BYTES:
        raise ValueError(f"the blob holds more than {MAX_TOKEN_BYTES // 4} tokens")
    ids = array("I", blob)
    if byteorder == "big":
        ids.byteswap()
    return ids


def tokens(blob: Any) -> str | None:
    """Token ids as a JSON array."""
    ids = token_ids(blob)
    return None if ids is None else json.dumps(list(ids), separators=(",", ":"))


def human_bytes(nbytes: float) -> str:
    """``1.2 GB``."""
    value = float(nbytes)
    for unit in UNITS:
        if abs(value) < 1000 or unit == UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def ago(us: float, now_us: int) -> str:
    """``3 min ago``, or ``in 3 min`` for what is to come."""
    seconds = (now_us - us) / 1_000_000
    unit, length = next((u, n) for u, n in SPANS if abs(seconds) >= n or n == 1)
    span = f"{abs(seconds) // length:.0f} {unit}"
    return f"in {span}" if seconds <= -1 else f"{span} ago"


def like(pattern: Any, text: Any, escape: Any = None) -> bool | None:
    """SQL's LIKE in one pass. SQLite's own takes minutes for a long pattern over a long text.

    Raises ValueError for texts and patterns that are too long.
    """
    if pattern is None or text is None:
        return None
    for value, most in ((pattern, MAX_PATTERN_CHARACTERS), (text, MAX_TEXT_CHARACTERS)):
        if isinstance(value, str | bytes) and len(value) > most:
            raise ValueError(
                f"texts have up to {MAX_TEXT_CHARACTERS} characters here and patterns up to "
                f"{MAX_PATTERN_CHARACTERS}"
            )
    pattern, text = _fold(pattern), _fold(text)
    if len(pattern) * len(text) > MAX_LIKE_STEPS:
        raise ValueError("so long a pattern takes too long over so long a text")
    pieces = _pieces(pattern, None if escape is None else _fold(escape))
    if pieces is None:
        return False
    if len(pieces) == 1:
        return re.fullmatch(pieces[0][0], text, re.DOTALL) is not None
    first, last = pieces[0], pieces[-1]
    if len(text) < first[1] + last[1] or not re.match(first[0], text, re.DOTALL):
        return False
    position, end = first[1], len(text) - last[1]
    # Each piece is taken where it occurs first, which is always right and never backtracks.
    for regex, width in pieces[1:-1]:
        found = re.compile(regex, re.DOTALL).search(text, position, end)
        if found is None:
            return False
        position = found.start() + width
    return position <= end and re.compile(last[0], re.DOTALL).fullmatch(text, end) is not None


def _pieces(pattern: str, escape: str | None) -> list[tuple[str, int]] | None:
    """What stands between the ``%`` signs: a regular expression of fixed width, and the width.
    None for a pattern that escapes its end, which matches nothing."""
    pieces = [("", 0)]
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            escaped = next(characters, None)
            if escaped is None:
                return None
            part = re.escape(escaped)
        elif character == "%":
            pieces.append(("", 0))
            continue
        else:
            part = "." if character == "_" else re.escape(character)
        regex, width = pieces[-1]
        pieces[-1] = (regex + part, width + 1)
    return pieces


def _fold(value: Any) -> str:
    """Lower case in ASCII only, as LIKE compares."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text.lower() if text.isascii() else re.sub("[A-Z]", lambda m: m[0].lower(), text)
