"""Bandwidths and capacities as they are written on a command line."""

from __future__ import annotations

import re
from math import inf

from kvdb.errors import UsageError

UNLIMITED = "unlimited"
RATE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([KMGT]?)(B|bit)/s", re.ASCII)
PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
MOST_NODES = 100_000


def parse_rate(text: str) -> float:
    """Bytes a second: ``100MB/s``, ``10Gbit/s``, ``0``, or ``unlimited`` (inf). Raises
    UsageError."""
    text = text.strip()
    if text in ("0", UNLIMITED):
        return 0.0 if text == "0" else inf
    found = RATE.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is no bandwidth; write 100MB/s, 10Gbit/s, 0 or {UNLIMITED}.")
    return float(found[1]) * PREFIXES[found[2]] / (8 if found[3] == "bit" else 1)


def rate_text(rate: float | None) -> str:
    """``100 MB/s``; ``none`` for 0 and ``unlimited`` for None."""
    if rate is None or not rate:
        return UNLIMITED if rate is None else "none"
    prefix = max((p for p in PREFIXES if PREFIXES[p] <= rate), key=PREFIXES.__getitem__, default="")
    return f"{rate / PREFIXES[prefix]:g} {prefix}B/s"


def parse_nodes(text: str) -> list[int]:
    """``1,10,1000``. Raises UsageError."""
    nodes: dict[int, None] = {}
    for piece in text.split(","):
        piece = piece.strip()
        if not re.fullmatch(r"[0-9]{1,6}", piece, re.ASCII) or not 1 <= int(piece) <= MOST_NODES:
            raise UsageError(
                f"{piece!r} is no number of machines; write 1 to {MOST_NODES:,}, such as 1,10,100."
            )
        nodes[int(piece)] = None
    return list(nodes)
