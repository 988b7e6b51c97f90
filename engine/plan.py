"""What to restore and what to compute: a pure function of a match, tested without a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.events import Reuse, Skip


class Block(Protocol):
    """What a plan needs to know of a matched block (kvdb.MatchedBlock has it)."""

    @property
    def start(self) -> int: ...
    @property
    def token_count(self) -> int: ...
    @property
    def live(self) -> bool: ...


class Shared(Protocol):
    """A sibling whose first ``token_count`` tokens continue the blocks (kvdb.SharedTail)."""

    @property
    def token_count(self) -> int: ...


class Found(Protocol):
    """What a plan needs to know of a match (kvdb.Match has it)."""

    @property
    def blocks(self) -> Sequence[Block]: ...
    @property
    def shared(self) -> Shared | None: ...
    @property
    def logits(self) -> object | None: ...


@dataclass(frozen=True, slots=True)
class Restore:
    """Read ``blocks`` (indices) and, if ``shared``, the shared tail; ``end`` tokens are covered,
    holes among them."""

    blocks: tuple[int, ...]
    shared: bool
    end: int


@dataclass(frozen=True, slots=True)
class Refill:
    """Forward tokens ``start`` to ``end`` over the restored prefix: a run of holes."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Forward tokens ``start`` to ``end``; the last one's logits begin the answer."""

    start: int
    end: int


Step = Restore | Refill | Compute


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in order, and what they come to. restored + refilled + computed = prompt tokens.

    Without a Compute step the answer begins from stored logits (``stored_logits``). ``reads`` are
    the blocks to restore; ``start`` is where computing the rest of the prompt begins.
    """

    steps: tuple[Step, ...]
    skip: Skip
    reads: tuple[int, ...]
    shared: bool
    start: int
    restored: int
    refilled: int
    computed: int
    stored_logits: bool


def plan(
    found: Found | None,
    prompt: int,
    reuse: Reuse,
    *,
    bad: Collection[int] = (),
    shared_ok: bool = True,
    logits_ok: bool = True,
) -> Plan:
    """Plan a prompt of ``prompt`` tokens.

    ``bad`` blocks, a shared tail that is not ``shared_ok`` and logits that are not ``logits_ok``
    could not be read: they count as absent. In exact mode computing starts at a block's start
    only, because a block's bits depend on where its forward began.
    """
    if found is None:
        return _assemble((), 0, prompt, (), shared=False, stored_logits=False)
    blocks = found.blocks
    usable = [block.live and index not in bad for index, block in enumerate(blocks)]
    kept = _kept(usable)
    shared = found.shared if reuse == "max" and shared_ok else None
    if shared is None:
        start = _end(blocks, kept)
    else:
        # A shared tail continues the last matched block: holes before it are worth a refill.
        kept = len(blocks)
        start = min(_end(blocks, kept) + shared.token_count, prompt)
    stored_logits = start == prompt and shared is None and found.logits is not None and logits_ok
    if start == prompt and not stored_logits:
        if reuse == "exact":
            kept = _kept(usable[: kept - 1])
            start = _end(blocks, kept)
        else:
            start = prompt - 1
    reads = tuple(i for i in range(kept) if usable[i] and blocks[i].start < start)
    holes = tuple(
        (blocks[i].start, blocks[i].start + blocks[i].token_count)
        for i in range(kept)
        if not usable[i]
    )
    return _assemble(
        reads, start, prompt, _merge(holes), shared=shared is not None, stored_logits=stored_logits
    )


def _kept(usable: Sequence[bool]) -> int:
    """How many leading blocks are of use: up to the last usable one, holes inside included."""
    return max((index + 1 for index, good in enumerate(usable) if good), default=0)


def _end(blocks: Sequence[Block], kept: int) -> int:
    return blocks[kept - 1].start + blocks[kept - 1].token_count if kept else 0


def _merge(holes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Holes that touch become one."""
    merged: list[tuple[int, int]] = []
    for start, end in holes:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return tuple(merged)


def _assemble(
    reads: tuple[int, ...],
    start: int,
    prompt: int,
    holes: tuple[tuple[int, int], ...],
    *,
    shared: bool,
    stored_logits: bool,
) -> Plan:
    steps: list[Step] = []
    if reads or shared:
        steps.append(Restore(reads, shared, start))
    steps += [Refill(*hole) for hole in holes]
    if not stored_logits:
        steps.append(Compute(start, prompt))
    refilled = sum(end - begin for begin, end in holes)
    restored, computed = start - refilled, prompt - start
    skip: Skip = "partial"
    if not restored and not refilled:
        skip = "none"
    elif refilled:
        skip = "refill"
    elif not computed:
        skip = "full"
    return Plan(
        tuple(steps), skip, reads, shared, start, restored, refilled, computed, stored_logits
    )
