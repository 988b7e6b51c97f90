"""The stored prefixes that requests share, found from the roots on by a bounded number of look-ups.

What :mod:`kvdb.report.tree` draws needs a pass over all blocks. This one is for a page that asks
again and again, of stores with millions of them: it may miss a branch, but never reads for long.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from kvdb.driver import Connection
from kvdb.explain.case import part_title
from kvdb.report.tree import Run
from kvdb.segments import load_segments

# Of each namespace, the newest beginnings; of each block, the newest that stand on it.
MOST_ROOTS = 1000
MOST_CHILDREN = 64
MOST_RUNS = 200
MOST_LOOKUPS = 3000
# So many of the latest requests may name the parts of their prompts.
MOST_REQUESTS = 200
ROOTS = (
    "SELECT id, token_count, hits FROM (SELECT id, token_count, hits, state, refs FROM blocks "
    "WHERE namespace_id = ? AND parent_id IS NULL ORDER BY id DESC LIMIT ?) "
    "WHERE state = 'live' OR refs > 0"
)
CHILDREN = (
    "SELECT id, token_count, hits FROM (SELECT id, token_count, hits, state, refs FROM blocks "
    "WHERE parent_id = ? ORDER BY id DESC LIMIT ?) WHERE state = 'live' OR refs > 0"
)
REQUESTS = (
    "SELECT namespace_id, coalesce(tip_id, deepest_block_id), segments FROM requests "
    "WHERE segments IS NOT NULL AND coalesce(tip_id, deepest_block_id) IS NOT NULL "
    "ORDER BY id DESC LIMIT ?"
)
PARENT = "SELECT parent_id FROM blocks WHERE id = ?"


def shared_runs(connection: Connection, namespace_ids: Sequence[int]) -> list[Run]:
    """At most MOST_RUNS runs, those first whose beginning was used most; their parents before
    them."""
    runs: list[Run] = []
    # (-hits, -id, tokens of the block, namespace, number of the parent's run, tokens before)
    waiting: list[tuple[int, int, int, int, int, int]] = []
    for namespace_id in namespace_ids:
        for id_, tokens, hits in connection.execute(ROOTS, (namespace_id, MOST_ROOTS)):
            waiting.append((-hits, -id_, tokens, namespace_id, -1, 0))
    heapq.heapify(waiting)
    lookups = 0
    while waiting and len(runs) < MOST_RUNS and lookups < MOST_LOOKUPS:
        less_hits, less_id, tokens, namespace_id, parent, start = heapq.heappop(waiting)
        last, end, children = -less_id, start + tokens, []
        while lookups < MOST_LOOKUPS:
            lookups += 1
            children = connection.execute(CHILDREN, (last, MOST_CHILDREN)).fetchall()
            if len(children) != 1:
                break
            last, end = children[0][0], end + children[0][1]
        run = Run(len(runs), parent, namespace_id, -less_id, start, end, -less_hits)
        runs.append(run)
        for id_, more, hits in children if len(children) > 1 else ():
            heapq.heappush(waiting, (-hits, -id_, more, namespace_id, run.number, end))
    return runs


def parts_reached(connection: Connection, runs: Iterable[Run]) -> dict[int, str]:
    """The part of a prompt that each run ends in, by its number, as the latest request through it
    has it; without those that no request among the latest went through."""
    firsts = {run.block_id: run for run in runs}
    parents: dict[int, int | None] = {}
    reached: dict[int, str] = {}
    for _, tip_id, segments in connection.execute(REQUESTS, (MOST_REQUESTS,)).fetchall():
        for run in _above(connection, tip_id, firsts, parents):
            if run.number not in reached:
                title = part_title(load_segments(segments), run.end - 1)
                if title is not None:
                    reached[run.number] = title
    return reached


def _above(
    connection: Connection,
    block_id: int | None,
    firsts: Mapping[int, Run],
    parents: dict[int, int | None],
) -> list[Run]:
    """The runs on the way from a block to its root, as far as there are look-ups left; ``parents``
    remembers them."""
    found = []
    while block_id is not None:
        if block_id in firsts:
            found.append(firsts[block_id])
        if block_id not in parents:
            if len(parents) >= MOST_LOOKUPS:
                break
            row = connection.execute(PARENT, (block_id,)).fetchone()
            parents[block_id] = None if row is None else row[0]
        block_id = parents[block_id]
    return found
