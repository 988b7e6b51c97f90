"""Plans of hybrid models against brute force: every walk is tried, token by token."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import Compute, Jump, Needs, Plan, Refill, Restore, plan

SIZE = 4  # a plan takes blocks as they are
FULL, WINDOW, STATE = "kv:0", "kv:1", "state:2"


@dataclass(frozen=True)
class Block:
    start: int
    token_count: int
    live: bool
    parts: frozenset[str]

    @property
    def end(self) -> int:
        return self.start + self.token_count


@dataclass(frozen=True)
class Shared:
    token_count: int
    block: Block


@dataclass(frozen=True)
class Found:
    blocks: tuple[Block, ...]
    shared: Shared | None
    logits: object | None


@dataclass(frozen=True)
class World:
    """A stored chain and a prompt over it; ``window`` 0 and ``recurrent`` False: no such layers."""

    found: Found
    prompt: int
    window: int
    recurrent: bool
    exact: bool

    @property
    def needs(self) -> Needs:
        return Needs(
            ((WINDOW, self.window),) if self.window else (), (STATE,) if self.recurrent else ()
        )

    def stored(self, part: str, token: int, shared: bool) -> bool:
        """Is a token's ``part`` stored, in the chain or (with ``shared``) in the shared tail?"""
        tail = self.found.shared
        if shared and tail is not None and tail.block.start <= token:
            return token < tail.block.start + tail.token_count and part in tail.block.parts
        return any(
            b.start <= token < b.end and b.live and part in b.parts for b in self.found.blocks
        )

    def may_jump(self, here: int, there: int, shared: bool) -> bool:
        """Everything a sequence standing at ``here`` needs to stand at ``there`` is stored."""
        if not all(self.stored(FULL, token, shared) for token in range(here, there)):
            return False
        first = max(here, there - self.window)
        if self.window and not all(
            self.stored(WINDOW, token, shared) for token in range(first, there)
        ):
            return False
        if not self.recurrent:
            return True
        tail = self.found.shared
        if shared:
            assert tail is not None
            whole = tail.block.start + tail.token_count == there
            return (
                whole and tail.token_count == tail.block.token_count and STATE in tail.block.parts
            )
        return any(b.end == there and b.live and STATE in b.parts for b in self.found.blocks)

    def cheapest(self) -> int:
        """Fewest tokens to forward, by Dijkstra over every walk. The last token's logits come from
        a forward, or are stored and nothing is forwarded behind the last jump."""
        ends = [0, *(block.end for block in self.found.blocks)]
        places = {end: False for end in ends}
        tail = None if self.exact else self.found.shared
        landing: set[tuple[int, bool]] = {(end, False) for end in ends}
        if tail is not None:
            landing.add((min(tail.block.start + tail.token_count, self.prompt - 1), True))
        elif not self.exact and not self.recurrent and ends[-1] == self.prompt:
            landing.add((self.prompt - 1, False))
        best = {0: 0}
        queue = [(0, 0)]
        answer = self.prompt
        while queue:
            cost, here = heapq.heappop(queue)
            if cost > best[here]:
                continue
            if here < self.prompt:
                answer = min(answer, cost + self.prompt - here)
            moves: list[tuple[int, int]] = []
            if here in places:
                for there, shared in landing:
                    if there > here and self.may_jump(here, there, shared):
                        if there == self.prompt and self.found.logits is not None:
                            answer = min(answer, cost)
                        moves.append((there, cost))
                moves += [
                    (b.end, cost + b.token_count) for b in self.found.blocks if b.start == here
                ]
            for there, spent in moves:
                if spent < best.get(there, 1 << 30):
                    best[there] = spent
                    heapq.heappush(queue, (spent, there))
        return answer


def walk(world: World, steps: Plan) -> None:
    """Carry a plan out token by token: nothing is used that is not there."""
    full: set[int] = set()
    sliding: set[int] = set()  # tokens that the live window layers could hold
    at, state_at, restored_end = 0, 0, None
    for step in steps.steps:
        if isinstance(step, Restore):
            for index in step.blocks:
                block = world.found.blocks[index]
                assert block.live
                full |= set(range(block.start, block.end))
            if step.shared:
                assert world.found.shared is not None
                tail = world.found.shared
                full |= set(range(tail.block.start, tail.block.start + tail.token_count))
            restored_end = step.end
        elif isinstance(step, Jump):
            assert step.start == at
            assert world.may_jump(at, step.end, step.shared)
            for part, blocks in step.windows:
                assert part == WINDOW
                for index in blocks:
                    block = world.found.blocks[index]
                    assert WINDOW in block.parts
                    sliding |= set(range(block.start, block.end))
            if step.shared:
                sliding |= set(range(world.found.shared.block.start, step.end))  # type: ignore[union-attr]
            assert (
                set(range(max(0, step.end - world.window), step.end)) <= sliding or not world.window
            )
            at = state_at = step.end
        else:
            if not world.needs:
                at = step.start
            assert step.start == at
            assert set(range(step.start)) <= full
            if world.recurrent:
                assert state_at == step.start
            forwarded = set(range(step.start, step.end))
            full |= forwarded
            sliding |= forwarded
            at = state_at = step.end
    assert set(range(world.prompt)) <= full
    if steps.stored_logits:
        assert restored_end == world.prompt
        assert not isinstance(steps.steps[-1], Compute)
    else:
        assert isinstance(steps.steps[-1], Compute)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    window = draw(st.sampled_from([0, 1, 3, 4, 6, 9, 40]))
    recurrent = draw(st.booleans())
    exact = draw(st.booleans())
    matched = draw(st.integers(0, 40))
    complete = draw(st.booleans())
    if not complete:
        matched -= matched % SIZE
    prompt = matched if complete and matched else matched + draw(st.integers(1, 9))
    optional = [WINDOW] * bool(window) + [STATE] * recurrent
    blocks = []
    for start in range(0, matched, SIZE):
        live = draw(st.integers(0, 5)) > 0
        own = {part for part in optional if draw(st.integers(0, 3)) > (2 if part == STATE else 0)}
        blocks.append(
            Block(start, min(SIZE, matched - start), live, frozenset({FULL} | own if live else ()))
        )
    shared = None
    if not exact and draw(st.booleans()):
        full_blocks = [b for b in blocks if b.token_count == SIZE]
        if recurrent:
            start = SIZE * draw(st.integers(0, len(full_blocks)))
            count = draw(st.integers(1, SIZE - 1))
            room = prompt - 1 - start
            if room >= count:
                shared = Shared(count, Block(start, count, True, frozenset({FULL, *optional})))
        elif prompt > matched:
            count = draw(st.integers(1, min(SIZE, prompt - matched)))
            parts = {FULL} | {p for p in optional if draw(st.integers(0, 3))}
            shared = Shared(count, Block(matched, SIZE, True, frozenset(parts)))
    logits = object() if matched == prompt and blocks[-1].live and draw(st.booleans()) else None
    return World(Found(tuple(blocks), shared, logits), prompt, window, recurrent, exact)


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_a_plan_is_sound_and_forwards_the_fewest_tokens(world: World) -> None:
    steps = plan(world.found, world.prompt, "exact" if world.exact else "max", world.needs)
    walk(world, steps)
    assert steps.refilled + steps.computed == world.cheapest()
    assert steps.restored + steps.refilled + steps.computed == world.prompt
    assert steps.refilled == sum(s.end - s.start for s in steps.steps if isinstance(s, Refill))
    if world.exact:
        starts = {0, *(block.start for block in world.found.blocks)} | {
            block.end for block in world.found.blocks if block.token_count == SIZE
        }
        assert all(s.start in starts for s in steps.steps if isinstance(s, Refill | Compute))


@settings(max_examples=100, deadline=None)
@given(worlds(), st.data())
def test_lost_parts_are_as_if_they_had_never_been(world: World, data: st.DataObject) -> None:
    blocks = world.found.blocks
    every = [(i, part) for i, block in enumerate(blocks) for part in sorted(block.parts)]
    if not every:
        return
    lost = data.draw(st.sets(st.sampled_from(every)))
    without = tuple(
        Block(
            block.start,
            block.token_count,
            block.live and (i, FULL) not in lost,
            block.parts - {part for index, part in lost if index == i},
        )
        for i, block in enumerate(blocks)
    )
    reuse = "exact" if world.exact else "max"
    bare = Found(without, world.found.shared, world.found.logits)
    found = plan(world.found, world.prompt, reuse, world.needs, lost=lost)  # type: ignore[arg-type]
    assert found == plan(bare, world.prompt, reuse, world.needs)  # type: ignore[arg-type]
