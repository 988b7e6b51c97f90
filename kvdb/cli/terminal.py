"""Text on a terminal: nothing that steers it, and no wider than it is."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence

from wcwidth import wcswidth, wcwidth

# C0 and C1 controls, lone surrogates, and what reorders or hides text.
UNSAFE = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
GAP = 2
LEAST_COLUMN, LEAST_HEADER = 8, 5
ELLIPSIS = "…"


def visible(text: str, *, keep: str = "") -> str:
    """``text`` with what could steer a terminal written as escapes, but for ``keep``."""

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        if character in keep:
            return character
        code = ord(character)
        return NAMED.get(character) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")

    return UNSAFE.sub(escape, text)


def is_terminal() -> bool:
    return sys.stdout.isatty()


def columns() -> int:
    """How many columns the terminal has."""
    return shutil.get_terminal_size().columns


def width(text: str) -> int:
    """Columns that printable text takes: an emoji has two."""
    return len(text) if text.isascii() else max(wcswidth(text), 0)


def shorten(text: str, most: int) -> str:
    """``text`` in at most ``most`` columns."""
    if len(text) <= most and width(text) <= most:
        return text
    taken, used = [], width(ELLIPSIS)
    for character in text:
        used += max(wcwidth(character), 0)
        if used > most:
            break
        taken.append(character)
    return "".join(taken) + ELLIPSIS if most > 0 else ""


def fitted(
    headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool], room: int
) -> list[int] | None:
    """How wide each column of a table is so that its rows, with gaps between, fit into ``room``;
    None when they cannot. Numbers are never cut."""
    values = [max(map(width, column)) for column in zip(*rows, strict=True)]
    natural = [max(have, width(name)) for have, name in zip(values, headers, strict=True)]
    least = [
        max(have, min(name, LEAST_HEADER)) if number else min(name, LEAST_COLUMN)
        for have, name, number in zip(values, natural, numeric, strict=True)
    ]
    room -= GAP * (len(natural) - 1)
    if sum(least) > room:
        return None
    widths = natural
    while sum(widths) > room:
        # The widest column that may give way does, down to the next one.
        widest = max((w for w, low in zip(widths, least, strict=True) if w > low), default=0)
        below = max((w for w in widths if w < widest), default=0)
        wide = [n for n, w in enumerate(widths) if w == widest and w > least[n]]
        step = max(1, min(widest - below, (sum(widths) - room) // len(wide)))
        for n in wide:
            widths[n] = max(least[n], widths[n] - step)
            if sum(widths) <= room:
                break
    return widths


def grid(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[bool],
    widths: Sequence[int],
) -> str:
    """A table with columns of these widths: what does not fit is cut, numbers stand right."""

    def line(cells: Sequence[str]) -> str:
        cut = [shorten(cell, most) for cell, most in zip(cells, widths, strict=True)]
        padded = [
            " " * (most - width(cell)) + cell if number else cell + " " * (most - width(cell))
            for cell, most, number in zip(cut, widths, numeric, strict=True)
        ]
        return (" " * GAP).join(padded).rstrip()

    head = []
    if any(headers):
        head = [line(headers), (" " * GAP).join("-" * most for most in widths)]
    return "\n".join([*head, *map(line, rows)])


def records(names: Sequence[str], rows: Sequence[Sequence[str]], room: int | None) -> str:
    """Each row as lines ``name  value``: for what is wider than the terminal."""
    label = max(map(width, names), default=0) + GAP
    aligned = room is None or label <= room // 2
    blocks = []
    for row in rows:
        lines: list[str] = []
        for name, value in zip(names, row, strict=True):
            begin = name + " " * (label - width(name)) if aligned else f"{name}: "
            if room is None or width(begin) + width(value) <= room:
                lines.append((begin + value).rstrip())
            elif aligned:
                first, *more = wrapped(value, room - label)
                lines += [begin + first, *(" " * label + piece for piece in more)]
            else:
                lines.append(shorten(f"{name}:", room))
                lines += ["  " + piece for piece in wrapped(value, max(room - 2, 1))]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def wrapped(text: str, room: int) -> list[str]:
    """``text`` cut into pieces of at most ``room`` columns."""
    pieces, piece, used = [], "", 0
    for character in text:
        wide = max(wcwidth(character), 0)
        if used + wide > room and piece:
            pieces.append(piece)
            piece, used = "", 0
        piece += character
        used += wide
    return [*pieces, piece]
