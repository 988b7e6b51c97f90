"""What to restore and what to compute: a pure function of a match, tested without a model.

A plan walks from token 0 to the prompt's end. At each block's end it may *jump* over blocks whose
state is stored, or forward a block's tokens. Where a jump may end depends on the layers: full
attention needs every block before, a sliding layer its last window, a recurrent one its state at
exactly that token. The walk with the fewest forwarded tokens wins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.events import Reuse, Skip

# Most of what a plan covers that may be missing and masked: a hit of 95 %.
MAX_MISSING = 0.05


class Block(Protocol):
    """What a plan needs to know of a matched block (kvdb.MatchedBlock has it)."""

    @property
    def start(self) -> int: ...
    @property
    def token_count(self) -> int: ...
    @property
    def live(self) -> bool: ...
    @property
    def parts(self) -> Container[str]: ...


class Shared(Protocol):
    """A block beside the matched ones, whose first ``token_count`` tokens are the prompt's
    (kvdb.SharedTail)."""

    @property
    def token_count(self) -> int: ...
    @property
    def block(self) -> Block: ...


class Found(Protocol):
    """What a plan needs to know of a match (kvdb.Match has it)."""

    @property
    def blocks(self) -> Sequence[Block]: ...
    @property
    def shared(self) -> Shared | None: ...
    @property
    def logits(self) -> object | None: ...


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model needs besides the full attention of everything before: ``windows`` are parts
    of sliding layers with the tokens they look back at, ``states`` those of recurrent layers."""

    windows: tuple[tuple[str, int], ...] = ()
    states: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.windows or self.states)


FULL_ATTENTION = Needs()


@dataclass(frozen=True, slots=True)
class Restore:
    """Read ``blocks`` (indices) and, if ``shared``, the shared tail; ``end`` tokens are covered,
    holes among them."""

    blocks: tuple[int, ...]
    shared: bool
    end: int


@dataclass(frozen=True, slots=True)
class Jump:
    """Sliding and recurrent layers go on at token ``end`` from token ``start``: with the
    ``windows`` of these blocks, the state behind block ``state``, both also of the shared tail if
    ``shared``. Tokens before ``start`` that a window reaches are in the live caches."""

    start: int
    end: int
    windows: tuple[tuple[str, tuple[int, ...]], ...]
    state: int | None
    shared: bool


@dataclass(frozen=True, slots=True)
class Refill:
    """Forward tokens ``start`` to ``end`` over the restored prefix: a run of holes, and where
    layers are recurrent also what lies between the last stored state and the hole."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Forward tokens ``start`` to ``end``; the last one's logits begin the answer."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Leave tokens ``start`` to ``end`` out of attention: holes that are not refilled."""

    start: int
    end: int


Step = Restore | Jump | Refill | Mask | Compute


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in order, and what they come to. restored + refilled + computed + masked = prompt
    tokens.

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
    masked: int
    stored_logits: bool

    @property
    def masks(self) -> tuple[tuple[int, int], ...]:
        """The tokens left out, as ``(first, end)``."""
        return tuple((step.start, step.end) for step in self.steps if isinstance(step, Mask))


def plan(
    found: Found | None,
    prompt: int,
    reuse: Reuse,
    needs: Needs = FULL_ATTENTION,
    *,
    bad: Collection[int] = (),
    lost: Collection[tuple[int, str]] = (),
    shared_ok: bool = True,
    logits_ok: bool = True,
    maskable: int = 0,
) -> Plan:
    """Plan a prompt of ``prompt`` tokens.

    ``bad`` blocks, ``lost`` parts of blocks, a shared tail that is not ``shared_ok`` and logits
    that are not ``logits_ok`` could not be read: they count as absent. In exact mode computing
    starts at a block's start only, because a block's bits depend on where its forward began.

    Holes that end at or before token ``maskable`` are masked, not refilled, if 95 % of what the
    plan covers is there and all layers are of full attention. The first block is always refilled:
    what attention has nowhere else to put goes to the first tokens.
    """
    if found is None:
        return _assemble((), prompt, needs, 0)
    stored_logits = found.logits is not None and logits_ok
    walk = _Walk(found.blocks, needs, set(bad), set(lost))
    reached = prompt if stored_logits else prompt - 1
    nodes = [node for node, at in enumerate(walk.starts) if at <= reached]
    # Of equal walks the first: it reads least.
    node = min(nodes, key=lambda node: walk.cost[node] - walk.starts[node])
    path, forwarded = walk.path(node), walk.cost[node] + prompt - walk.starts[node]
    if reuse == "max":
        shared = found.shared if shared_ok else None
        ending = walk.into_shared(shared, prompt) if shared else walk.into_last(prompt)
        if ending is not None and ending[0] < forwarded:
            path = ending[1]
    return _assemble(path, prompt, needs, 0 if needs or reuse == "exact" else maskable)


@dataclass(frozen=True, slots=True)
class _Edge:
    """From token ``start`` to ``end`` by forwarding, or by a jump over ``blocks``."""

    start: int
    end: int
    jump: bool
    blocks: tuple[int, ...] = ()
    windows: tuple[tuple[str, tuple[int, ...]], ...] = ()
    state: int | None = None
    shared: bool = False
    masked: bool = False

    @property
    def tokens(self) -> int:
        return self.end - self.start


class _Walk:
    """The cheapest way to every block's end. Node k is the start of block k; ``cost`` counts the
    tokens forwarded to get there."""

    def __init__(
        self,
        blocks: Sequence[Block],
        needs: Needs,
        bad: set[int],
        lost: set[tuple[int, str]],
    ) -> None:
        self._blocks = blocks
        self._needs = needs
        optional = {name for name, _ in needs.windows} | set(needs.states)
        gone = bad | {index for index, part in lost if part not in optional}
        self._live = [block.live and i not in gone for i, block in enumerate(blocks)]
        self._lost = lost
        self.starts = [0, *(block.start + block.token_count for block in blocks)]
        self.cost = [0]
        self._from: list[int | None] = [None]  # the node of the jump that leads here, if one does
        self._run = 0  # where the run of live blocks begins that ends here
        self._window_runs = [0] * len(needs.windows)
        self._runs: list[tuple[int, tuple[int, ...]]] = [(0, tuple(self._window_runs))]
        stack: list[int] = []  # nodes that cost less than all after them, to find the cheapest
        for index in range(len(blocks)):
            while stack and self.cost[stack[-1]] > self.cost[index]:
                stack.pop()
            stack.append(index)
            self._extend_runs(index)
            self._arrive(index, stack)

    def _extend_runs(self, index: int) -> None:
        if not self._live[index]:
            self._run = index + 1
        for number, (part, _) in enumerate(self._needs.windows):
            if not self._has(index, part):
                self._window_runs[number] = index + 1
        self._runs.append((self._run, tuple(self._window_runs)))

    def _arrive(self, index: int, stack: Sequence[int]) -> None:
        node = index + 1
        forwarded = self.cost[index] + self._blocks[index].token_count
        source = None
        if all(self._has(index, part) for part in self._needs.states):
            floor = self._floor(node, self.starts[node])
            first = bisect_left(stack, floor)
            source = stack[first] if first < len(stack) else None
        if source is not None and self.cost[source] <= forwarded:
            self.cost.append(self.cost[source])
            self._from.append(source)
        else:
            self.cost.append(forwarded)
            self._from.append(None)

    def _has(self, index: int, part: str) -> bool:
        here = self._live[index] and part in self._blocks[index].parts
        return here and (index, part) not in self._lost

    def _floor(self, node: int, position: int) -> int:
        """The first node from which a jump to ``position``, at ``node`` or before it in its last
        block, finds all that is stored of the tokens between."""
        floor, window_runs = self._runs[node]
        for (_, window), run in zip(self._needs.windows, window_runs, strict=True):
            if self.starts[run] > max(0, position - window):
                floor = max(floor, run)
        return floor

    def _windows(
        self, source: int, node: int, position: int
    ) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The blocks from ``source`` to ``node`` that the windows before ``position`` reach."""
        return tuple(
            (
                part,
                tuple(i for i in range(source, node) if self.starts[i + 1] > position - window),
            )
            for part, window in self._needs.windows
        )

    def path(self, node: int) -> tuple[_Edge, ...]:
        """The edges that lead to a node, first one first."""
        edges: list[_Edge] = []
        while node:
            source = self._from[node]
            end = self.starts[node]
            if source is None:
                edges.append(_Edge(self.starts[node - 1], end, False))
                node -= 1
                continue
            edges.append(self._jump(source, node, end))
            node = source
        return tuple(reversed(edges))

    def _jump(self, source: int, node: int, position: int, *, shared: bool = False) -> _Edge:
        return _Edge(
            self.starts[source],
            position,
            True,
            tuple(range(source, node)),
            self._windows(source, node, position),
            node - 1 if self._needs.states and not shared else None,
            shared,
        )

    def into_shared(self, shared: Shared, prompt: int) -> tuple[int, tuple[_Edge, ...]] | None:
        """(tokens forwarded in all, edges) of the walk that ends in the shared tail, if there is
        one. It leaves the prompt's last token, whose logits nobody stored."""
        start, stop = shared.block.start, shared.block.start + shared.token_count
        wanted = [*(part for part, _ in self._needs.windows), *self._needs.states]
        if any(part not in shared.block.parts for part in wanted):
            return None
        if start not in self.starts or (self._needs.states and stop >= prompt):
            return None
        node = self.starts.index(start)
        return self._ending(node, node, min(stop, prompt - 1), prompt, shared=True)

    def into_last(self, prompt: int) -> tuple[int, tuple[_Edge, ...]] | None:
        """The same into the prompt's own last block, to compute its last token again."""
        node = len(self._blocks)
        if self._needs.states or not node or self.starts[node] != prompt:
            return None
        return self._ending(node, node - 1, prompt - 1, prompt, shared=False)

    def _ending(
        self, node: int, last: int, position: int, prompt: int, *, shared: bool
    ) -> tuple[int, tuple[_Edge, ...]] | None:
        """Jump to ``position`` from the cheapest node up to ``last``."""
        sources = range(self._floor(node, position), last + 1)
        if position <= self.starts[last] or not sources:
            return None
        source = min(sources, key=lambda node: (self.cost[node], node))
        edge = self._jump(source, node, position, shared=shared)
        return self.cost[source] + prompt - position, (*self.path(source), edge)


def _mask(path: Sequence[_Edge], maskable: int) -> Sequence[_Edge]:
    missing = sum(edge.tokens for edge in path if not edge.jump)
    if not missing or missing > MAX_MISSING * path[-1].end:
        return path
    return [
        replace(edge, masked=not edge.jump and edge.start > 0 and edge.end <= maskable)
        for edge in path
    ]


def _assemble(path: Sequence[_Edge], prompt: int, needs: Needs, maskable: int) -> Plan:
    while path and not path[-1].jump:  # what is forwarded last is the rest of the prompt
        path = path[:-1]
    path = _mask(path, maskable)
    start = path[-1].end if path else 0
    shared = bool(path) and path[-1].shared
    reads = tuple(index for edge in path for index in edge.blocks)
    steps: list[Step] = []
    if path:
        steps.append(Restore(reads, shared, start))
    for edge in path:
        if edge.jump:
            if needs:
                steps.append(Jump(edge.start, edge.end, edge.windows, edge.state, edge.shared))
            continue
        kind, last = Mask if edge.masked else Refill, steps[-1]
        if isinstance(last, Mask | Refill) and type(last) is kind and last.end == edge.start:
            steps[-1] = replace(last, end=edge.end)
        else:
            steps.append(kind(edge.start, edge.end))
    if start < prompt:
        steps.append(Compute(start, prompt))
    masked = sum(edge.tokens for edge in path if edge.masked)
    refilled = sum(edge.tokens for edge in path if not edge.jump) - masked
    restored, computed = start - refilled - masked, prompt - start
    skip: Skip = "partial"
    if not restored and not refilled:
        skip = "none"
    elif masked:
        skip = "approximate"
    elif refilled:
        skip = "refill"
    elif not computed:
        skip = "full"
    return Plan(
        tuple(steps),
        skip,
        reads,
        shared,
        start,
        restored,
        refilled,
        computed,
        masked,
        start == prompt,
    )
