"""Blocks as a tree of prompts: a run of blocks without a fork is one line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvdb.cli import terminal

# (id, parent id, hash, tokens, hits, state)
Row = tuple[int, int | None, str, int, int, str]
SHOWN_HASH = 8
SHOWN_TEXT = 120
# Characters that two siblings share before the rest says more.
ALIKE = 20


@dataclass(slots=True)
class Run:
    """Blocks that follow each other: the first one's id and hash, and sums."""

    id: int
    hash: str
    blocks: int
    tokens: int
    hits: int
    holes: int
    children: list[int] = field(default_factory=list)


def draw(rows: Sequence[Row], texts: Callable[[str], dict[int, str]], room: int | None) -> str:
    """The tree of ``rows``. ``texts`` gives the text of blocks, whose ids it takes as a JSON
    array."""
    runs, roots = collapse(rows)
    words = _apart(texts(json.dumps(list(runs))), [roots, *(run.children for run in runs.values())])
    lines: list[str] = []
    # (run, what its line begins with, what those below it begin with)
    waiting = [(id_, "", "") for id_ in reversed(roots)]
    while waiting:
        id_, begin, below = waiting.pop()
        run = runs[id_]
        line = begin + _describe(run, words.get(id_))
        lines.append(line if room is None else terminal.shorten(line, room))
        for child in reversed(run.children):
            if child == run.children[-1]:
                waiting.append((child, below + "└─ ", below + "   "))
            else:
                waiting.append((child, below + "├─ ", below + "│  "))
    return "\n".join(lines)


def _apart(texts: dict[int, str], siblings: Iterable[Sequence[int]]) -> dict[int, str]:
    """How each text begins, or where it parts from the sibling above when they begin alike."""
    shown = {id_: text[:SHOWN_TEXT] for id_, text in texts.items()}
    for ids in siblings:
        for above, below in itertools.pairwise(ids):
            pairs = zip(texts.get(above, ""), texts.get(below, ""), strict=False)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if common > ALIKE:
                word = texts[below].rfind(" ", 0, common) + 1
                shown[below] = "…" + texts[below][word : word + SHOWN_TEXT]
    return shown


def collapse(rows: Sequence[Row]) -> tuple[dict[int, Run], list[int]]:
    """(runs by the id of their first block, the first ones without a parent among the rows)."""
    children: dict[int | None, list[int]] = {}
    blocks = {row[0]: row for row in rows}
    for id_, parent, *_ in rows:
        children.setdefault(parent if parent in blocks else None, []).append(id_)
    runs: dict[int, Run] = {}
    starts = list(children.get(None, []))
    for id_ in starts:  # grows as runs end
        _, _, hash_, tokens, hits, state = blocks[id_]
        run = Run(id_, hash_, 1, tokens, hits, int(state != "live"))
        below = children.get(id_, [])
        # A run goes on while the only child was used as often.
        while len(below) == 1 and blocks[below[0]][4] == hits:
            _, _, _, tokens, _, state = blocks[below[0]]
            run.blocks, run.tokens = run.blocks + 1, run.tokens + tokens
            run.holes += state != "live"
            below = children.get(below[0], [])
        run.children = below
        runs[id_] = run
        starts += below
    return runs, children.get(None, [])


def _describe(run: Run, text: str | None) -> str:
    words = [run.hash[:SHOWN_HASH], f"{run.tokens:,} tokens"]
    if run.blocks > 1:
        words.append(f"{run.blocks} blocks")
    words.append(f"{run.hits} hit{'' if run.hits == 1 else 's'}")
    if run.holes:
        words.append(f"{run.holes} without bytes")
    line = ", ".join(words)
    if text:
        line += "  " + terminal.visible(" ".join(text.split()))
    return line
