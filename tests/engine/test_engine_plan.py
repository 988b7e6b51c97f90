"""Plans, without a model: what is restored, refilled and computed for every kind of match."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from engine.plan import MAX_MISSING, Compute, Mask, Needs, Plan, Refill, Restore, plan

SIZE = 16


@dataclass(frozen=True)
class Block:
    start: int
    token_count: int
    live: bool = True
    parts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Shared:
    token_count: int
    block: Block = Block(0, SIZE)


@dataclass(frozen=True)
class Found:
    blocks: tuple[Block, ...] = ()
    shared: Shared | None = None
    logits: object | None = None


def chain(tokens: int, holes: tuple[int, ...] = ()) -> tuple[Block, ...]:
    return tuple(
        Block(start, min(SIZE, tokens - start), index not in holes)
        for index, start in enumerate(range(0, tokens, SIZE))
    )


def test_nothing_stored_computes_everything() -> None:
    for found in (None, Found()):
        assert plan(found, 40, "max") == Plan(
            (Compute(0, 40),), "none", (), False, 0, 0, 0, 40, 0, False
        )


def test_whole_prompt_with_logits_computes_nothing() -> None:
    steps = plan(Found(chain(40), logits=object()), 40, "max")
    assert steps.steps == (Restore((0, 1, 2), False, 40),)
    assert (steps.skip, steps.restored, steps.stored_logits) == ("full", 40, True)


def test_whole_prompt_without_logits_computes_the_last_token() -> None:
    steps = plan(Found(chain(40)), 40, "max")
    assert steps.steps == (Restore((0, 1, 2), False, 39), Compute(39, 40))
    assert (steps.skip, steps.restored, steps.computed) == ("partial", 39, 1)


def test_a_last_block_of_one_token_is_not_read_to_be_computed() -> None:
    steps = plan(Found(chain(33)), 33, "max")
    assert steps.steps == (Restore((0, 1), False, 32), Compute(32, 33))


def test_exact_mode_recomputes_the_last_block() -> None:
    steps = plan(Found(chain(40)), 40, "exact")
    assert steps.steps == (Restore((0, 1), False, 32), Compute(32, 40))
    only = plan(Found(chain(10)), 10, "exact")
    assert only.steps == (Compute(0, 10),)
    assert only.skip == "none"


def test_exact_mode_drops_holes_that_would_end_the_prefix() -> None:
    steps = plan(Found(chain(48, holes=(1,))), 48, "exact")
    assert steps.steps == (Restore((0,), False, 16), Compute(16, 48))


def test_holes_are_refilled_and_runs_of_them_joined() -> None:
    steps = plan(Found(chain(96, holes=(1, 2, 4)), logits=object()), 96, "max")
    assert steps.steps == (Restore((0, 3, 5), False, 96), Refill(16, 48), Refill(64, 80))
    assert (steps.skip, steps.restored, steps.refilled) == ("refill", 48, 48)
    assert steps.stored_logits


def test_trailing_holes_are_computed() -> None:
    steps = plan(Found(chain(64, holes=(2, 3))), 70, "max")
    assert steps.steps == (Restore((0, 1), False, 32), Compute(32, 70))
    assert steps.skip == "partial"


def test_a_shared_tail_continues_the_prefix() -> None:
    steps = plan(Found(chain(32), Shared(5, Block(32, 9))), 60, "max")
    assert steps.steps == (Restore((0, 1), True, 37), Compute(37, 60))
    alone = plan(Found((), Shared(5)), 60, "max")
    assert alone.steps == (Restore((), True, 5), Compute(5, 60))
    assert alone.skip == "partial"


def test_a_shared_tail_that_covers_the_prompt_leaves_its_last_token() -> None:
    steps = plan(Found(chain(32), Shared(8, Block(32, 8))), 40, "max")
    assert steps.steps == (Restore((0, 1), True, 39), Compute(39, 40))


def test_exact_mode_shares_no_tail() -> None:
    assert plan(Found(chain(32), Shared(5, Block(32, 9))), 60, "exact").start == 32


def test_what_is_missing_and_may_be_is_masked() -> None:
    found = Found(chain(SIZE * 60, holes=(3, 4)), logits=object())
    steps = plan(found, SIZE * 60, "max", maskable=SIZE * 5)
    assert steps.steps[1:] == (Mask(48, 80),)
    assert (steps.skip, steps.masked, steps.refilled) == ("approximate", 32, 0)
    # One of the two lies in what may not be left out.
    steps = plan(found, SIZE * 60, "max", maskable=SIZE * 4 + 15)
    assert steps.steps[1:] == (Mask(48, 64), Refill(64, 80))
    assert (steps.masked, steps.refilled, steps.restored) == (16, 16, SIZE * 58)
    recurrent = Needs(states=("state:0",))
    for other in (plan(found, 960, "exact", maskable=960), plan(found, 960, "max", recurrent)):
        assert other.masked == 0


@given(
    st.integers(1, 200), st.sets(st.integers(0, 199), max_size=12), st.integers(0, 4000), st.data()
)
def test_masking_leaves_the_rest_of_a_plan_alone(
    blocks: int, holes: set[int], maskable: int, data: st.DataObject
) -> None:
    tokens = SIZE * blocks
    prompt = tokens + data.draw(st.integers(0, 40))
    found = Found(chain(tokens, tuple(holes)))
    refilled = plan(found, prompt, "max")
    steps = plan(found, prompt, "max", maskable=maskable)
    assert (steps.start, steps.reads, steps.restored) == (
        refilled.start,
        refilled.reads,
        refilled.restored,
    )
    assert steps.masked + steps.refilled == refilled.refilled
    assert steps.restored + steps.refilled + steps.computed + steps.masked == prompt
    assert steps.masked <= MAX_MISSING * steps.start
    if refilled.refilled > MAX_MISSING * steps.start:
        assert steps == refilled
    assert all(SIZE <= start < end <= maskable for start, end in steps.masks)
    forwarded = [(s.start, s.end) for s in steps.steps if isinstance(s, Refill | Mask)]
    assert sum(end - start for start, end in forwarded) == refilled.refilled
    if steps.masked and steps.refilled:  # what is refilled had no leave to be masked
        first = [s for s in steps.steps if isinstance(s, Refill)]
        assert all(s.start == 0 or s.end > maskable for s in first)


def test_what_could_not_be_read_becomes_holes() -> None:
    found = Found(chain(96), logits=object())
    steps = plan(found, 96, "max", bad={0, 2})
    assert steps.steps == (Restore((1, 3, 4, 5), False, 96), Refill(0, 16), Refill(32, 48))
    assert plan(found, 96, "max", bad={5}).steps[-1] == Compute(80, 96)
    assert plan(found, 96, "max", bad=set(range(6))).skip == "none"
    assert plan(found, 96, "max", logits_ok=False).steps[-1] == Compute(95, 96)
    assert plan(Found(chain(32), Shared(5, Block(32, 9))), 60, "max", shared_ok=False).start == 32


@given(
    tokens=st.integers(1, 200),
    extra=st.integers(0, 40),
    holes=st.sets(st.integers(0, 12)),
    shared=st.integers(0, SIZE),
    logits=st.booleans(),
    reuse=st.sampled_from(["max", "exact"]),
)
def test_every_token_is_restored_or_computed_once(
    tokens: int, extra: int, holes: set[int], shared: int, logits: bool, reuse: str
) -> None:
    whole = tokens // SIZE * SIZE if extra else tokens
    prompt = tokens + extra
    tail = Shared(min(shared, prompt - whole), Block(whole, SIZE)) if extra and shared else None
    found = Found(chain(whole, tuple(holes)), tail, object() if logits and not extra else None)
    steps = plan(found, prompt, reuse)  # type: ignore[arg-type]
    assert steps.restored + steps.refilled + steps.computed == prompt
    assert (steps.computed == 0) == steps.stored_logits
    state = [0] * prompt
    for step in steps.steps:
        if isinstance(step, Restore):
            for index in step.blocks:
                block = found.blocks[index]
                assert block.live
                for at in range(block.start, min(block.start + block.token_count, steps.start)):
                    state[at] += 1
            if step.shared:
                for at in range(whole, steps.start):
                    state[at] += 1
        else:
            for at in range(step.start, step.end):
                state[at] += 1
    assert state == [1] * prompt
    if reuse == "exact":
        assert all(step.start % SIZE == 0 for step in steps.steps if not isinstance(step, Restore))
