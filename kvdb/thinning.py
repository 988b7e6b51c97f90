"""Thins what only matters where a restore ends: recurrent states, and parts of sliding layers.

A sequence is mostly continued at its tip; the further behind it, the fewer places are kept where a
restore may end. They are the last ones in cells whose width is a power of two of the distance to
the tip, so that narrow cells become halves of wide ones as the tip moves on, and what a wide cell
keeps is what one of its halves kept. Blocks stay: only optional parts go, each with its row in
``evictions`` (reason ``replaced``: a place nearer the tip stands for it).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvdb import index
from kvdb.driver import Connection
from kvdb.layout import Layout

# Cells for each doubling of the distance: a restore that ends elsewhere loses at most this share
# of what lies behind it.
STATE_CELLS = 4
WINDOW_CELLS = 16
# Long chains are looked at when they have grown by so many blocks, or end in a tail.
EVERY_BLOCKS = 8

CHAIN = """
WITH RECURSIVE chain (id, parent_id, depth, token_count) AS (
    SELECT id, parent_id, depth, token_count FROM blocks WHERE id = ?
    UNION ALL
    SELECT b.id, b.parent_id, b.depth, b.token_count
    FROM chain JOIN blocks AS b ON b.id = chain.parent_id
)
SELECT c.id, c.depth, c.token_count, p.part
FROM chain AS c LEFT JOIN parts AS p ON p.block_id = c.id ORDER BY c.depth
"""
# Blocks of the chain that others stand on too: another sequence leaves it there.
FORKS = """
SELECT c.depth, c.token_count FROM blocks AS c
WHERE c.id IN (SELECT value FROM json_each(?1)) AND EXISTS (
    SELECT 1 FROM blocks AS b WHERE b.parent_id = c.id AND b.token_count = ?2
        AND b.id NOT IN (SELECT value FROM json_each(?1)) AND (b.state = 'live' OR b.refs > 0)
)
"""
# Tails beside the chain, the newest: ends of other sequences, or of this one's past.
TAILS = """
SELECT b.id, b.depth, b.token_count, t.tokens,
    (SELECT json_group_array(part) FROM parts WHERE block_id = b.id)
FROM blocks AS b JOIN block_tokens AS t ON t.block_id = b.id
WHERE b.parent_id IN (SELECT value FROM json_each(?1)) AND b.token_count < ?2
    AND b.id NOT IN (SELECT value FROM json_each(?1)) AND (b.state = 'live' OR b.refs > 0)
    AND b.last_access > 0
ORDER BY b.id DESC LIMIT 512
"""
CHAIN_TOKENS = (
    "SELECT block_id, tokens FROM block_tokens WHERE block_id IN (SELECT value FROM json_each(?))"
)
NAMED_TIPS = (
    "SELECT tip_id FROM sequences WHERE name IS NOT NULL "
    "AND tip_id IN (SELECT value FROM json_each(?))"
)
SUPERSEDE_UNHELD = index.SUPERSEDE + " AND refs = 0"


@dataclass(slots=True)
class _Stored:
    """A block, the tokens it covers, and its parts."""

    id: int
    start: int
    end: int
    parts: set[str]


def due(layout: Layout, block_tokens: int, tokens: int) -> bool:
    """Whether a chain that grew to ``tokens`` tokens is to be looked at."""
    if not layout.windows and not layout.states:
        return False
    return tokens % (EVERY_BLOCKS * block_tokens) == 0 or tokens % block_tokens != 0


def thin(
    connection: Connection, layout: Layout, block_tokens: int, tip_id: int, now: int
) -> list[int]:
    """Thin the chain of one tip, in the caller's transaction. Returns the shards that lost a
    part."""
    chain = _blocks(connection.execute(CHAIN, (tip_id,)).fetchall(), block_tokens)
    tip = chain[-1].end
    beside, forks = _beside(connection, chain, block_tokens)
    keys = json.dumps([block.id for block in (*chain, *beside)])
    named = {row[0] for row in connection.execute(NAMED_TIPS, (keys,))}
    forks |= {block.end for block in (*chain, *beside) if block.id in named}
    drop = _Drop(connection, now)
    if layout.states:
        states = set(layout.states)
        ends = {block.end for block in (*chain, *beside) if states <= block.parts}
        kept = places(ends, tip, STATE_CELLS, 1) | (ends & forks) | {tip}
        for block in (*chain, *beside):
            if block.end not in kept and drop.parts(block, states) and block in beside:
                # Without its state it is only a copy of what the chain has.
                connection.execute(SUPERSEDE_UNHELD, (block.id,))
    else:
        ends = {block.end for block in chain}
        kept = places(ends, tip, WINDOW_CELLS, block_tokens) | forks | {tip}
    for part, window in layout.windows.items():
        reached = _reached(chain, kept, window)
        for block in chain:
            if block.id not in reached:
                drop.parts(block, {part})
    return drop.shards


def places(ends: Iterable[int], tip: int, cells: int, unit: int) -> set[int]:
    """Of the places where a restore may end, those to keep; distances count in ``unit`` tokens."""
    last: dict[tuple[int, int], int] = {}
    for end in ends:
        distance = max(1, (tip - end) // (unit * cells))
        width = unit << (distance.bit_length() - 1)
        cell = (width, (end - 1) // width)
        last[cell] = max(end, last.get(cell, 0))
    return set(last.values())


def _reached(chain: Sequence[_Stored], kept: Collection[int], window: int) -> set[int]:
    """Ids of the blocks that the window before some kept place reaches."""
    reached: set[int] = set()
    ends = sorted(kept)
    at = len(ends) - 1
    for block in reversed(chain):
        # The nearest kept place behind the block's first token looks back the least far.
        while at > 0 and ends[at - 1] > block.start:
            at -= 1
        if ends[at] > block.start and ends[at] - window < block.end:
            reached.add(block.id)
    return reached


def _beside(
    connection: Connection, chain: Sequence[_Stored], block_tokens: int
) -> tuple[list[_Stored], set[int]]:
    """Tails whose tokens the chain has too (this sequence's past), and where other sequences leave
    the chain."""
    key = (json.dumps([block.id for block in chain]), block_tokens)
    forks = {depth * block_tokens + count for depth, count in connection.execute(FORKS, key)}
    tails = connection.execute(TAILS, key).fetchall()
    by_depth = {block.start // block_tokens: block.id for block in chain}
    wanted = [by_depth[depth] for _, depth, *_ in tails if depth in by_depth]
    tokens = dict(connection.execute(CHAIN_TOKENS, (json.dumps(wanted),)).fetchall())
    past: list[_Stored] = []
    for id_, depth, count, own, parts in tails:
        start = depth * block_tokens
        if own and tokens.get(by_depth.get(depth), b"").startswith(own):
            past.append(_Stored(id_, start, start + count, set(json.loads(parts))))
        else:
            forks.add(start)
    return past, forks


def _blocks(rows: Iterable[tuple[int, int, int, str | None]], block_tokens: int) -> list[_Stored]:
    blocks: dict[int, _Stored] = {}
    for id_, depth, count, part in rows:
        start = depth * block_tokens
        block = blocks.setdefault(id_, _Stored(id_, start, start + count, set()))
        if part is not None:
            block.parts.add(part)
    return list(blocks.values())


class _Drop:
    """Drops optional parts, and remembers the shards that held them."""

    def __init__(self, connection: Connection, now: int) -> None:
        self._connection = connection
        self._now = now
        self.shards: list[int] = []

    def parts(self, block: _Stored, names: Collection[str]) -> bool:
        """Drop those of ``names`` that a block has; True if there were any."""
        dropped = block.parts & set(names)
        if dropped:
            rows = self._connection.execute(index.BLOCK_SHARDS, (block.id,))
            self.shards += [shard for (shard,) in rows]
        for name in sorted(dropped):
            index.drop_part(
                self._connection,
                block.id,
                name,
                required=False,
                now=self._now,
                reason="replaced",
                detail="thinned",
            )
        return bool(dropped)
