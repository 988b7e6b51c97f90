"""Where recurrent layers leave a state behind: a pure function of lengths and sizes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from kvdb.layout import Layout

# States every so many blocks may take this share of the bytes of what is cut along tokens.
STATE_SHARE = 0.5
# Without attention there is nothing to measure a state by: one every so many tokens.
BARE_STRIDE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Tokens behind which a state is kept: ``points``, and every ``stride`` tokens (0: none)."""

    points: tuple[int, ...] = ()
    stride: int = 0

    def __contains__(self, position: int) -> bool:
        return position in self.points or (self.stride > 0 and position % self.stride == 0)

    def after(self, position: int) -> int | None:
        """The first boundary behind ``position``, if there is one."""
        later = self.points[bisect_right(self.points, position) :][:1]
        if self.stride:
            later += ((position // self.stride + 1) * self.stride,)
        return min(later, default=None)


NO_BOUNDARIES = Boundaries()


def boundaries(
    layout: Layout, block_tokens: int, prompt: int, messages: Iterable[int], *, exact: bool
) -> Boundaries:
    """The boundaries of a prompt whose messages end at ``messages``: these, before the prompt's
    last token (the next text may change how it is cut into tokens), behind it, and every stride.
    In exact mode the block ends at or before them, since only these bits can be computed again."""
    if not layout.states:
        return NO_BOUNDARIES
    wanted = {*(at for at in messages if 0 < at < prompt), prompt - 1}
    if exact:
        wanted = {at // block_tokens * block_tokens for at in wanted}
    points = sorted(at for at in {*wanted, prompt} if at > 0)
    return Boundaries(tuple(points), stride_blocks(layout, block_tokens) * block_tokens)


def stride_blocks(layout: Layout, block_tokens: int) -> int:
    """Every how many blocks a state is kept: it costs at most STATE_SHARE of their other bytes."""
    states = sum(part.nbytes(block_tokens) for part in layout.parts if part.kind == "state")
    others = [part for part in layout.parts if part.kind == "kv" and not part.is_mark]
    attended = sum(part.nbytes(block_tokens) for part in others)
    if not attended:
        return max(1, BARE_STRIDE_TOKENS // block_tokens)
    return max(1, math.ceil(states / (STATE_SHARE * attended)))
