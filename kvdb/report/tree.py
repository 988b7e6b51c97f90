"""The part of the prefix tree that is worth drawing: its heaviest branches, chains folded.

A *run* is a chain of blocks without a branch. Most blocks of a store lie in few runs, so runs are
the boxes of the picture: the heaviest ones are opened first until there are enough.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdb.driver import Connection
from kvdb.report.blocks import HeldBlocks

MAX_BOXES = 120
MAX_LEVELS = 8
# A narrower box is a line nobody can read.
MIN_SHARE = 0.004
# How much of a run is decoded to show how it begins.
SHOWN_TOKENS = 24
# The marks of chat templates, such as <|im_start|>, are the same everywhere.
MARKUP = re.compile(r"<\|[^|<>]{1,40}\|>")
BEGINNING = (
    "SELECT lower(hex(b.hash)), substr(t.tokens, 1, ?) FROM blocks AS b "
    "LEFT JOIN block_tokens AS t ON t.block_id = b.id WHERE b.id = ?"
)

Decode = Callable[[Sequence[int]], str]
# Gives the tokenizer of a namespace, where it is known.
Decoder = Callable[[int], Decode | None]


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks without a branch: ``start`` … ``end`` are their token positions; ``hits`` is how often
    the first one was used again. ``parent`` is the number of another run, -1 at the root.
    ``block_id`` is the run's first block."""

    number: int
    parent: int
    namespace_id: int
    block_id: int
    start: int
    end: int
    hits: int


@dataclass(frozen=True, slots=True)
class Box(Run):
    """A run that is drawn; ``subtree_tokens`` counts it and all that stands on it."""

    subtree_tokens: int


@dataclass(frozen=True, slots=True)
class Beginning:
    """The hash of a run's first block, and how its text begins, where the tokenizer is known."""

    hash: str
    text: str | None


@dataclass(slots=True)
class Rest:
    """What stands on a box, or at the root of a namespace, and is not drawn."""

    parent: int
    namespace_id: int
    branches: int = 0
    tokens: int = 0


@dataclass(slots=True)
class PrefixTree:
    """The boxes, each after its parent, and what was left out. ``tokens`` is what all roots hold;
    it is the tokens in the boxes themselves and those in ``rests``."""

    boxes: list[Box] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    tokens: int = 0


def prefix_tree(
    blocks: HeldBlocks,
    *,
    most: int = MAX_BOXES,
    levels: int = MAX_LEVELS,
    smallest_share: float = MIN_SHARE,
) -> PrefixTree:
    """Choose at most ``most`` boxes, heaviest first, at most ``levels`` deep."""
    tree = PrefixTree(tokens=int(blocks.tokens.sum()))
    smallest = tree.tokens * smallest_share
    rests: dict[tuple[int, int], Rest] = {}
    # (weight, row of the run's first block, number of the parent's box, level, tokens before)
    waiting: list[tuple[int, int, int, int, int]] = []

    def leave_out(row: int, parent: int) -> None:
        namespace_id = int(blocks.namespace[row])
        rest = rests.setdefault((parent, namespace_id), Rest(parent, namespace_id))
        rest.branches += 1
        rest.tokens += int(blocks.subtree_tokens[row])

    def wait(rows: Iterable[int], parent: int, level: int, start: int) -> None:
        for row in rows:
            weight = int(blocks.subtree_tokens[row])
            if weight < smallest or level == levels:
                leave_out(row, parent)
            else:
                heapq.heappush(waiting, (-weight, row, parent, level, start))

    wait(blocks.children(-1).tolist(), -1, 0, 0)
    while waiting and len(tree.boxes) < most:
        _, row, parent, level, start = heapq.heappop(waiting)
        box, last = _run(blocks, row, len(tree.boxes), parent, start)
        tree.boxes.append(box)
        wait(blocks.children(last).tolist(), box.number, level + 1, box.end)
    for _, row, parent, _, _ in waiting:
        leave_out(row, parent)
    tree.rests = list(rests.values())
    return tree


def _run(blocks: HeldBlocks, row: int, number: int, parent: int, start: int) -> tuple[Box, int]:
    """The run that begins at a row, and the row it ends in."""
    last, end = row, start + int(blocks.tokens[row])
    while len(children := blocks.children(last)) == 1:
        last = int(children[0])
        end += int(blocks.tokens[last])
    box = Box(
        number,
        parent,
        int(blocks.namespace[row]),
        int(blocks.id[row]),
        start,
        end,
        int(blocks.hits[row]),
        int(blocks.subtree_tokens[row]),
    )
    return box, last


def read_beginnings(
    connection: Connection, runs: Iterable[Run], decoder: Decoder
) -> dict[int, Beginning]:
    """How runs begin, by their numbers; without those whose block went meanwhile."""
    beginnings = {}
    for run in runs:
        row = connection.execute(BEGINNING, (4 * SHOWN_TOKENS, run.block_id)).fetchone()
        if row is not None:
            decode = decoder(run.namespace_id)
            text = None
            if decode is not None and row[1] is not None:
                text = decode(np.frombuffer(row[1], "<u4").tolist())
                text = " ".join(MARKUP.sub(" ", text).split())
            beginnings[run.number] = Beginning(row[0], text)
    return beginnings
