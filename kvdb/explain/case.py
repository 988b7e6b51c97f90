"""A prompt whose miss is to be explained, and the stored chain it is compared to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdb.explain.keyspaces import KeySpace
from kvdb.identity import Tokens
from kvdb.segments import Segment

Decode = Callable[[Sequence[int]], str]
END_OF_TIME = (1 << 63) - 1


@dataclass(frozen=True)
class Case:
    """``matched`` blocks of the prompt are (or were) held, ``tip_id`` is the last of them. State
    could be used up to token ``reach``, of which ``hits`` tokens were there; of the first
    ``stored`` tokens all blocks were, even where layers without full attention could not go on.
    What is younger than ``before`` (Unix µs) counts for nothing, nor do the ``own`` blocks (row
    ids) of the past request ``request_id``: it is explained by what it could meet."""

    space: KeySpace
    tokens: Tokens
    hashes: Sequence[bytes]
    segments: Sequence[Segment]
    decode: Decode | None
    matched: int
    tip_id: int | None
    hits: int
    reach: int
    stored: int = 0
    before: int = END_OF_TIME
    own: frozenset[int] = frozenset()
    request_id: int | None = None

    @property
    def lacks_boundary(self) -> bool:
        """Whether a block or more that is stored could not be used."""
        return self.stored > self.reach + self.space.block_tokens


@dataclass(frozen=True)
class Neighbour:
    """The stored chain that shares most with a prompt. ``tokens`` are all of its tokens that the
    index still has, ``shared`` how many of them the prompt begins with. ``request_id`` is a request
    that ended in this chain, ``segments`` the parts of its prompt of ``prompt_tokens``."""

    tokens: Tokens
    shared: int
    block_hash: bytes
    request_id: int | None = None
    prompt_tokens: int | None = None
    segments: Sequence[Segment] = field(default=())

    @property
    def name(self) -> str:
        """What it is called in an explanation."""
        if self.request_id is not None:
            return f"request {self.request_id}"
        return f"block {self.block_hash.hex()[:16]}"


def part_title(segments: Sequence[Segment], at: int | None) -> str | None:
    """What people call the part that token ``at`` lies in; None where that is not known."""
    index = None if at is None else part_at(segments, at)
    if index is None:
        return None
    return segments[index].title(sum(segment.kind == "tool" for segment in segments))


def part_at(segments: Sequence[Segment], token: int) -> int | None:
    """Index of the part that holds ``token``; None behind the last."""
    ends = [segment.end for segment in segments]
    index = int(np.searchsorted(ends, token, side="right"))
    return index if index < len(segments) else None


def part_start(segments: Sequence[Segment], index: int) -> int:
    return segments[index - 1].end if index else 0


def equal_parts(a: Sequence[Segment], b: Sequence[Segment]) -> int:
    """How many tokens of two prompts are in leading parts of equal content and length."""
    end = 0
    for mine, theirs in zip(a, b, strict=False):
        if (mine.kind, mine.digest, mine.end) != (theirs.kind, theirs.digest, theirs.end):
            break
        end = mine.end
    return end


# Runs this long are the same text, not the same phrase by chance.
RUN = 16


def reusable(case: Case, neighbour: Neighbour) -> int:
    """Tokens of the prompt from the difference on that the neighbour has too, anywhere: what would
    have hit if nothing had been moved or changed before them, and equal content been written
    alike."""
    at = neighbour.shared
    known = in_common_runs(case.tokens[at:], neighbour.tokens[at:])
    contents = {part.digest for part in neighbour.segments if part.digest and part.end > at}
    start = 0
    for part in case.segments:
        if part.end > at and part.digest in contents:
            known[max(start - at, 0) : part.end - at] = True
        start = part.end
    return int(np.count_nonzero(known))


def in_common_runs(prompt: Tokens, stored: Tokens) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which tokens of ``prompt`` are in runs of at least RUN that ``stored`` has too."""
    if min(len(prompt), len(stored)) < RUN:
        return np.zeros(len(prompt), dtype=np.bool_)
    covered = np.zeros(len(prompt) + 1, dtype=np.int64)
    starts = np.flatnonzero(np.isin(_runs(prompt), _runs(stored)))
    np.add.at(covered, starts, 1)
    np.add.at(covered, starts + RUN, -1)
    return np.cumsum(covered)[:-1] > 0


def _runs(tokens: Tokens) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """A 64-bit number for every run of RUN tokens."""
    wide = tokens.astype(np.uint64)
    count = len(wide) - RUN + 1
    total = np.zeros(count, dtype=np.uint64)
    for offset in range(RUN):
        total = total * np.uint64(0x9E3779B97F4A7C15) + wide[offset : offset + count]
    return total
