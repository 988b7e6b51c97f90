"""The big table: whatever is restored, the logits of every step equal those of a cold run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import Run, equal, prompt_tokens, run

import kvdb
from engine import Engine
from engine.storage import Read, Storage
from kvdb.store import Store

BLOCK = 256
LENGTHS = (1, 255, 256, 257, 600, 2100)
SHARED = (0, 1, 100)
MODES = ("max", "exact")


class Zeroing(Storage):
    """A store whose reads come back with the bytes of one block zeroed: what a checksum that
    nobody checks would let through."""

    def __init__(self, inner: Storage, block: int) -> None:
        super().__init__(inner.store, inner.namespace, inner.build)
        self.block = block

    def read(self, match: Any, wants: Any) -> Read:
        result = super().read(match, wants)
        for want in wants:
            for tensors in want.buffers:
                for tensor in tensors:
                    tensor[:, :, self.block * BLOCK : (self.block + 1) * BLOCK] = 0
        return result


class Bench:
    """One engine, a fresh key space for each case, cold runs remembered."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.cold_runs: dict[tuple[int, str], Run] = {}
        self.spaces = 0

    def fresh(self) -> None:
        self.spaces += 1

        def change(worker: Any) -> None:
            store = worker.storage.store
            namespace = store.namespace(
                worker.loaded.identity,
                worker.layout,
                block_tokens=BLOCK,
                salt=self.spaces.to_bytes(4, "little"),
            )
            build = store.build(namespace, "the build of this test", worker.description)
            worker.storage = Storage(store, namespace, build)

        self.engine.call(change)

    def damage(self, block: int) -> None:
        def change(worker: Any) -> None:
            worker.storage = Zeroing(worker.storage, block)

        self.engine.call(change)

    def cold(self, length: int, reuse: str) -> Run:
        key = (length, reuse)
        if key not in self.cold_runs:
            self.fresh()
            self.cold_runs[key] = run(self.engine, prompt_tokens(length), reuse=reuse, store=False)
            assert self.cold_runs[key].stats.restored_tokens == 0
        return self.cold_runs[key]

    def seed(self, length: int, blocks: int, shared: int, reuse: str) -> int:
        """Store ``blocks`` blocks of the prompt and a sibling that shares ``shared`` tokens more;
        returns how many tokens are stored of it."""
        self.fresh()
        prompt = prompt_tokens(length)
        stored = min(blocks * BLOCK, length)
        tail = min(shared, length - stored)
        if stored == length:
            run(self.engine, prompt, reuse=reuse, max_tokens=1)
        elif stored or tail:
            # The sibling goes on differently, so that its block is another one.
            other = (prompt[stored + tail] + 1) % 127 if stored + tail < length else 5
            run(self.engine, [*prompt[: stored + tail], other, 3], reuse=reuse, max_tokens=1)
        return stored + tail


@pytest.fixture(scope="module")
def bench(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with (
        kvdb.open(tmp_path_factory.mktemp("equality") / "store", min_free_bytes=0) as store,
        Engine(store, str(tiny)) as engine,
    ):
        yield Bench(engine)


def hits(length: int) -> list[int]:
    every = -(-length // BLOCK)
    return sorted({0, min(1, every), every - 1, every})


CASES = [
    (length, blocks, shared, reuse)
    for length in LENGTHS
    for blocks in hits(length)
    for shared in SHARED
    for reuse in MODES
    if not (shared and blocks * BLOCK >= length)
]


@pytest.mark.parametrize(("length", "blocks", "shared", "reuse"), CASES)
def test_restored_equals_cold(
    bench: Bench, length: int, blocks: int, shared: int, reuse: str
) -> None:
    cold = bench.cold(length, reuse)
    stored = bench.seed(length, blocks, shared, reuse)
    warm = run(bench.engine, prompt_tokens(length), reuse=reuse)
    stats = warm.stats
    assert equal(cold, warm, reuse)
    assert stats.restored_tokens + stats.refilled_tokens + stats.computed_tokens == length
    assert stats.forwarded_prompt_tokens == stats.computed_tokens
    if stored == length and blocks * BLOCK >= length:
        assert (stats.skip, stats.computed_tokens) == ("full", 0)
    elif reuse == "exact":
        assert stats.restored_tokens == min(blocks * BLOCK, length)
    else:
        assert stats.restored_tokens == min(stored, length - 1)


@pytest.mark.parametrize("reuse", MODES)
@pytest.mark.parametrize("length", [257, 600, 2100])
def test_a_damaged_block_is_noticed_by_the_comparison(
    bench: Bench, length: int, reuse: str
) -> None:
    cold = bench.cold(length, reuse)
    for blocks in hits(length)[1:]:
        bench.seed(length, blocks, 0, reuse)
        bench.damage(blocks // 2 if blocks < -(-length // BLOCK) else 0)
        broken = run(bench.engine, prompt_tokens(length), reuse=reuse, store=False)
        assert broken.stats.restored_tokens > 0
        # A first token from stored logits is right; the state behind it is not.
        start = 1 if broken.stats.skip == "full" else 0
        cut_cold = replace(cold, logits=cold.logits[start:])
        assert not equal(cut_cold, replace(broken, logits=broken.logits[start:]), reuse)


def test_turns_of_a_conversation_hit_what_was_generated(
    tiny: Path, store: Store, make_engine: Any
) -> None:
    engine = make_engine(store, tiny, block_tokens=64)
    cold = make_engine(None, tiny, block_tokens=64)
    prompt = prompt_tokens(150)
    first = run(engine, prompt, max_tokens=60)
    second = [*prompt, *first.ids, *prompt_tokens(20, seed=3)]
    warm = run(engine, second)
    # All but the last generated token went through the model, so their state is stored.
    assert warm.stats.restored_tokens == len(prompt) + 59
    assert equal(run(cold, second), warm, "max")


@pytest.mark.parametrize("reuse", MODES)
def test_steps_of_many_blocks(tiny: Path, store: Store, make_engine: Any, reuse: str) -> None:
    """A GPU's step holds several blocks: each is cut out of the chunk, and may be missing alone."""
    cold = make_engine(None, tiny, block_tokens=64, step=512)
    warm = make_engine(store, tiny, block_tokens=64, step=512)
    prompt = prompt_tokens(1300)
    reference = run(cold, prompt, reuse=reuse)
    first = run(warm, prompt, reuse=reuse, max_tokens=1)
    rows = store.sql("SELECT depth, token_count FROM blocks ORDER BY depth").rows
    assert rows == [(n, 64) for n in range(20)] + [(20, 20)]
    assert np.array_equal(first.logits[0], reference.logits[0])
    for length in (1300, 1299, 1280, 700, 130):
        again = run(warm, prompt[:length], reuse=reuse)
        assert equal(run(cold, prompt[:length], reuse=reuse), again, reuse)
        assert again.stats.restored_tokens >= min(length - 1, length // 64 * 64 - 64)


def test_prompt_stored_as_part_of_a_longer_one(bench: Bench) -> None:
    for reuse in MODES:
        cold = bench.cold(600, reuse)
        bench.fresh()
        run(bench.engine, [*prompt_tokens(600), 1, 2, 3], reuse=reuse, max_tokens=1)
        warm = run(bench.engine, prompt_tokens(600), reuse=reuse)
        assert equal(cold, warm, reuse)
        assert warm.stats.restored_tokens == (599 if reuse == "max" else 512)
        again = run(bench.engine, prompt_tokens(600), reuse=reuse)
        assert again.stats.skip == "full"
        assert np.array_equal(again.logits[0], warm.logits[0])


def test_exact_mode_never_uses_inexact_state(bench: Bench) -> None:
    cold = bench.cold(600, "exact")
    bench.fresh()
    run(bench.engine, prompt_tokens(600), reuse="max")
    exact = run(bench.engine, prompt_tokens(600), reuse="exact")
    assert exact.stats.restored_tokens == 0
    assert equal(cold, exact, "exact")
    again = run(bench.engine, prompt_tokens(600), reuse="exact")
    assert again.stats.skip == "full"
    assert equal(cold, again, "exact")


def test_logits_of_an_inexact_run_do_not_reach_exact_mode(bench: Bench) -> None:
    """An exact prompt's block gets its logits from another prompt's inexact run that ends there."""
    cold = bench.cold(512, "exact")
    bench.fresh()
    run(bench.engine, [*prompt_tokens(512), 1], reuse="exact", max_tokens=1)
    run(bench.engine, prompt_tokens(512), reuse="max", max_tokens=1)
    warm = run(bench.engine, prompt_tokens(512), reuse="exact")
    assert equal(cold, warm, "exact")
