"""Numbers, times and foreign names as a person reads them."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime

MAX_NAME = 48


def shown(name: str, most: int = MAX_NAME) -> str:
    """A name that somebody else chose, on one line: control and direction characters made visible,
    cut to ``most`` characters."""
    cut = name if len(name) <= most else name[: most - 1] + "…"
    return "".join(_visible(character) for character in cut)


def _visible(character: str) -> str:
    if character == "\n":
        return "↵"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return f"⟨{ord(character):02X}⟩"
    return character


def amount(number: float) -> str:
    """``12,345``, ``1.24 million``, ``3.5 billion``."""
    for limit, word in ((1e9, "billion"), (1e6, "million")):
        if abs(number) >= limit:
            return f"{number / limit:.3g} {word}"
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """``1 block``, ``12,345 blocks``."""
    return f"{amount(number)} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 20 s``, ``1 h 29 min``, ``2 days 3 h``."""
    if seconds < 0:
        return "−" + duration(-seconds)
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for large, large_name, small, small_name in (
        (60, "min", 1, "s"),
        (3600, "h", 60, "min"),
        (86400, "days", 3600, "h"),
    ):
        if whole < large * 60 or large == 86400:
            first, rest = divmod(whole, large)
            second = rest // small
            name = "day" if first == 1 and large_name == "days" else large_name
            return f"{first:,} {name} {second} {small_name}" if second else f"{first:,} {name}"
    raise AssertionError


def percent(share: float) -> str:
    """``68 %``; one digit more where that tells something: ``99.4 %``, ``0.3 %``."""
    value = 100 * share
    if 0 < value < 0.05:
        return "under 0.1 %"
    near_an_end = 0 < value < 9.95 or 90 < value < 99.95
    return f"{value:.1f} %" if near_an_end else f"{value:.0f} %"


def moment(at_us: int) -> str:
    """``2026-09-21 14:05``, UTC."""
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M")


def day(at_us: int) -> str:
    """``21 September 2026``, UTC."""
    when = datetime.fromtimestamp(at_us / 1e6, UTC)
    return f"{when.day} {when:%B %Y}"
