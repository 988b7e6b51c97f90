"""The held blocks of a store: how old and how used they are, and the tree that they form.

One pass over the rows, in short transactions, into arrays; what is drawn is chosen from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvdb.driver import Database
from kvdb.report.history import DAY_US, HOUR_US, WEEK_US

Ints = npt.NDArray[np.int64]

# About 200 bytes of memory each. The page says so when there are more.
MAX_BLOCKS = 2_000_000
ROWS_PER_READ = 50_000
HELD = (
    "SELECT id, coalesce(parent_id, 0), namespace_id, depth, token_count, hits, created_at "
    "FROM blocks WHERE id > ?1 AND (state = 'live' OR refs > 0) "
    "AND (?2 IS NULL OR namespace_id = ?2) ORDER BY id LIMIT ?3"
)

AGES = (
    ("under 1 hour", HOUR_US),
    ("under 1 day", DAY_US),
    ("under 1 week", WEEK_US),
    ("under 1 month", 30 * DAY_US),
    ("older", None),
)
HEATS = (("never used again", 0), ("used once", 1), ("2 to 9 times", 9), ("10 or more", None))


@dataclass(frozen=True)
class HeldBlocks:
    """Columns of the held blocks in order of id. ``parent`` is 0 for a root; ``complete`` is False
    when there were more than MAX_BLOCKS."""

    id: Ints
    parent: Ints
    namespace: Ints
    depth: Ints
    tokens: Ints
    hits: Ints
    created_at: Ints
    complete: bool

    def __len__(self) -> int:
        return len(self.id)

    @cached_property
    def parent_row(self) -> Ints:
        """The row of each block's parent; -1 where it has none among these."""
        row = np.searchsorted(self.id, self.parent)
        row[row == len(self)] = 0
        return np.where(self.id[row] == self.parent, row, -1)

    @cached_property
    def subtree_tokens(self) -> Ints:
        """Tokens of each block and of all blocks that stand on it."""
        total = self.tokens.copy()
        order = np.argsort(self.depth, kind="stable")
        bounds = np.flatnonzero(np.diff(self.depth[order])) + 1
        for level in reversed(np.split(order, bounds)):
            level = level[self.parent_row[level] >= 0]
            np.add.at(total, self.parent_row[level], total[level])
        return total

    @cached_property
    def _by_parent(self) -> tuple[Ints, Ints]:
        """Rows in order of their parent's row, and where each parent's begin."""
        order = np.argsort(self.parent_row, kind="stable")
        starts = np.searchsorted(self.parent_row[order], np.arange(-1, len(self) + 1))
        return order, starts

    def children(self, row: int) -> Ints:
        """Rows of the children of a row; of -1, the roots."""
        order, starts = self._by_parent
        return order[starts[row + 1] : starts[row + 2]]


def read_blocks(
    database: Database, namespace_id: int | None = None, most: int = MAX_BLOCKS
) -> HeldBlocks:
    """All held blocks, or those of a namespace; at most ``most``, the oldest."""
    pieces = [np.zeros((0, 7), np.int64)]
    last, count, complete = 0, 0, True
    while True:
        with database.read() as connection:
            rows = connection.execute(HELD, (last, namespace_id, ROWS_PER_READ)).fetchall()
        if not rows:
            break
        if count + len(rows) > most:
            rows, complete = rows[: most - count], False
        pieces.append(np.array(rows, np.int64).reshape(-1, 7))
        count += len(rows)
        if not complete:
            break
        last = rows[-1][0]
    id_, parent, namespace, depth, tokens, hits, created_at = np.concatenate(pieces).T.copy()
    return HeldBlocks(id_, parent, namespace, depth, tokens, hits, created_at, complete)


def age_and_heat(blocks: HeldBlocks, now_us: int) -> Ints:
    """Blocks by age (rows as in AGES) and by uses (columns as in HEATS)."""
    age_limits = [limit for _, limit in AGES if limit is not None]
    heat_limits = [limit for _, limit in HEATS if limit is not None]
    age = np.searchsorted(age_limits, np.maximum(now_us - blocks.created_at, 0), side="right")
    heat = np.searchsorted(heat_limits, blocks.hits, side="left")
    counts = np.zeros((len(AGES), len(HEATS)), np.int64)
    np.add.at(counts, (age, heat), 1)
    return counts
