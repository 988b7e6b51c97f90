"""Batches: who is grouped with whom, what padding costs, whose row is whose, who goes next."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from engine import cachekinds
from engine.batch import MAX_RATIO, MAX_WASTE, Decoder, Seat, partition
from engine.batchkinds import KINDS, alone_reason, join, share, view
from engine.events import Priority
from engine.mlxlm import GROWTH
from engine.options import ALONE, TOGETHER
from engine.order import Order


def steps(lengths: Sequence[int]) -> list[int]:
    return [length // GROWTH + 1 for length in lengths]


@settings(deadline=None)
@given(st.lists(st.integers(1, 100_000), max_size=40))
def test_groups_waste_at_most_half_and_are_few(lengths: list[int]) -> None:
    groups = [[lengths[index] for index in group] for group in partition(lengths)]
    assert sorted(length for group in groups for length in group) == sorted(lengths)
    for group in groups:
        assert sum(steps(group)) >= (1 - MAX_WASTE) * max(steps(group)) * len(group)
        assert min(steps(group)) * MAX_RATIO > max(steps(group)) or len(group) == 1
    for group, following in itertools.pairwise(groups):
        more = steps([*group, following[0]])
        wasteful = sum(more) < (1 - MAX_WASTE) * max(more) * len(more)
        assert wasteful or min(more) * MAX_RATIO <= max(more)


def test_outliers_decode_apart() -> None:
    assert partition([256, 16_384, *[256] * 6]) == [[1], [0, 2, 3, 4, 5, 6, 7]]
    assert partition([10, 300, 500, 40]) == [[1, 2, 0, 3]]
    assert partition([]) == []


def random_seat(worker: Any, length: int, seed: int) -> Seat:
    """A state of ``length`` tokens that no prompt need be computed for."""
    caches = worker.new_caches()
    for number, cache in enumerate(caches):
        shape = (1, 1, -(-length // GROWTH) * GROWTH, 32)
        cache.keys = mx.random.normal(shape, key=mx.random.key(seed * 100 + number))
        cache.values, cache.offset = cache.keys + 1, length
    mx.eval([cache.state for cache in caches])
    return Seat(caches, length)


@dataclass(frozen=True)
class Cost:
    peak: int
    state: int
    padded: int
    step_ms: float


def cost(worker: Any, lengths: Sequence[int], grouping: Any) -> Cost:
    """What some decode steps of requests of these lengths take."""
    seats = [random_seat(worker, length, n) for n, length in enumerate(lengths)]
    decoder = Decoder(worker.model, grouping)
    mx.clear_cache()
    mx.reset_peak_memory()
    decoder.arrange(seats)
    times = []
    for _ in range(9):
        began = time.perf_counter()
        for group in decoder.groups:
            rows = decoder.forward(group, [mx.array([1])] * len(group))
            mx.eval([row.raw for row in rows.values()])
        times.append((time.perf_counter() - began) * 1e3)
    state = decoder.nbytes + sum(seat.nbytes for seat in seats)
    return Cost(mx.get_peak_memory(), state, decoder.padded_nbytes, statistics.median(times))


def test_one_long_request_beside_short_ones(tiny: Path, make_engine: Any) -> None:
    """1 × 16 K beside 7 × 256 tokens (DESIGN.md 9: 2.2 GB for 0.3 GB, eight times the time)."""
    lengths = (16_384, *[256] * 7)
    engine = make_engine(None, tiny)
    apart = engine.call(lambda worker: cost(worker, lengths, partition))
    together = engine.call(lambda worker: cost(worker, lengths, lambda lengths: [list(range(8))]))
    print(f"\napart {apart}\ntogether {together}")
    assert (apart.padded, together.padded) == (0, 7 * (16_384 - 256) * 2 * 2 * 32 * 4)
    assert together.state > 6 * apart.state
    assert together.peak > 2.5 * apart.peak
    assert together.step_ms > 1.2 * apart.step_ms


def filled(kind: type, length: int, seed: int) -> Any:
    """A cache as a prefill leaves it, holding random values."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32))

    if kind is ArraysCache:
        cache = ArraysCache(2)
        cache.cache = [random(1, 3, 4), random(1, 2, 4, 4)]
        return cache
    if kind is CacheList:
        return CacheList(filled(KVCache, length, seed), filled(ArraysCache, length, seed + 99))
    cache = RotatingKVCache(max_size=16) if kind is RotatingKVCache else KVCache()
    for start in range(0, length, 10):
        step = min(10, length - start)
        cache.update_and_fetch(random(1, 2, step, 4), random(1, 2, step, 4))
    return cache


def content(cache: Any) -> list[Any]:
    """What a cache holds, in order of tokens."""
    if isinstance(cache, CacheList):
        return [content(inner) for inner in cache.caches]
    if isinstance(cache, ArraysCache):
        return [np.array(array).tolist() for array in cache.cache]
    count = cache.size()
    arrays = cache.keys, cache.values
    if isinstance(cache, RotatingKVCache):
        arrays = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
        return [np.array(array)[:, :, -count:].tolist() for array in arrays]
    return [np.array(array)[:, :, :count].tolist() for array in arrays]


@settings(deadline=None)
@given(
    st.sampled_from([KVCache, RotatingKVCache, ArraysCache, CacheList]),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(0, 40),
)
def test_a_row_is_what_it_would_be_alone(kind: type, lengths: list[int], more: int) -> None:
    """Joined, some tokens later, viewed, and joined again, it holds what the cache alone holds."""
    alone = [filled(kind, length, seed) for seed, length in enumerate(lengths)]
    batch = join([share(cache) for cache in alone], lengths)
    rng = np.random.default_rng(0)
    for _ in range(more if kind in (KVCache, RotatingKVCache) else 0):
        new = mx.array(rng.normal(size=(len(lengths), 2, 1, 4)).astype(np.float32))
        batch.update_and_fetch(new, -new)
        for row, cache in enumerate(alone):
            cache.update_and_fetch(new[row : row + 1], -new[row : row + 1])
        lengths = [length + 1 for length in lengths]
    for row, cache in enumerate(alone):
        one = view(batch, row, lengths[row])
        assert content(one) == content(cache)
        own = view(join([one], [lengths[row]]), 0, lengths[row])
        assert content(own) == content(cache)


def test_sharers_of_a_state_do_not_see_each_others_tokens() -> None:
    for kind in (KVCache, RotatingKVCache, ArraysCache, CacheList):
        first, alone = filled(kind, 30, 1), [filled(kind, 30, 1) for _ in range(2)]
        second = share(first)
        for step in range(20):
            append(second, step + 100.0)
            append(first, float(step))
        for step in range(20):
            append(alone[0], float(step))
            append(alone[1], step + 100.0)
        assert [content(first), content(second)] == [content(cache) for cache in alone]


def append(cache: Any, value: float) -> None:
    if isinstance(cache, CacheList):
        for inner in cache.caches:
            append(inner, value)
    elif isinstance(cache, ArraysCache):
        cache[0] = cache[0] + value
        cache[1][:, 0] = value
    else:
        token = mx.full((1, 2, 1, 4), value)
        cache.update_and_fetch(token, -token)


def test_what_has_no_batch_form_says_so() -> None:
    assert {kind.__name__ for kind in KINDS} == set(TOGETHER)
    theirs = {kind.__name__ for kind in cachekinds.KINDS if kind.__module__.startswith("mlx_lm.")}
    assert not theirs - {*TOGETHER, *ALONE}
    assert alone_reason([KVCache(), RotatingKVCache(8), CacheList(KVCache())]) is None
    assert "ChunkedKVCache" in (alone_reason([CacheList(KVCache(), ChunkedKVCache(8))]) or "")
    assert "keep" in (alone_reason([RotatingKVCache(8, keep=4)]) or "")


@dataclass(frozen=True)
class Asked:
    priority: Priority
    arrived: float


def test_interactive_requests_go_first_and_none_starves() -> None:
    now = 0.0
    order = Order(30.0, lambda: now)
    old, new = Asked("batch", 0.0), Asked("batch", 1.0)
    first, second = Asked("interactive", 2.0), Asked("interactive", 3.0)
    waiting = [new, second, old, first]
    assert order.sort(waiting) == [first, second, old, new]
    now = 30.5
    turns = []
    for _ in range(12):
        chosen = order.sort(waiting)[0]
        order.took(chosen)
        turns.append(chosen)
    # The oldest that has waited for too long gets one turn in four.
    assert turns == [first, first, first, old] * 3
