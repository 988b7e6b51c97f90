"""Old boundary states and window parts thin out; what is left is sound, counted, and enough."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdb
from kvdb.layout import LayerSpec, Layout, TensorSpec
from kvdb.match import Namespace
from kvdb.store import Store
from kvdb.thinning import STATE_CELLS, WINDOW_CELLS, places
from kvdb.writer import Payload
from tests.support import (
    BLOCK,
    kv_layer,
    open_namespace,
    part_bytes,
    put_all,
    random_tokens,
    state_layer,
)

SLIDING = LayerSpec(
    "RotatingKVCache",
    tuple(TensorSpec(name, "F32", (1, 1, 4), 2) for name in ("keys", "values")),
    required=False,
    attributes=(("window", BLOCK + 3),),
)
WINDOWS = Layout((kv_layer(), SLIDING))
STATES = Layout((kv_layer(), state_layer(64)))


@settings(max_examples=50)
@given(
    cells=st.sampled_from([STATE_CELLS, WINDOW_CELLS]),
    unit=st.sampled_from([1, 16]),
    gaps=st.lists(st.integers(1, 9), min_size=1, max_size=300),
)
def test_few_places_stay_and_none_is_far_from_where_it_is_wanted(
    cells: int, unit: int, gaps: list[int]
) -> None:
    kept: set[int] = set()
    every = (np.cumsum(gaps) * unit).tolist()
    for tip in every:  # as it grows, only what was kept before can be kept
        kept = places({*kept, tip}, tip, cells, unit)
    tip = every[-1]
    # Each doubling of the distance has its cells, and one more that the border cuts.
    assert len(kept) <= 2 * cells + (cells + 2) * (tip // unit).bit_length()
    for wanted in every:
        nearest = max((at for at in kept if at <= wanted), default=0)
        assert wanted - nearest <= max(0, 4 * (tip - nearest) / cells)


def parts_left(store: Store, part: str) -> list[int]:
    """Depths of full blocks that still have a part."""
    rows = store.sql(
        "SELECT b.depth FROM parts AS p JOIN blocks AS b ON b.id = p.block_id "
        "WHERE p.part = ? AND b.token_count = ? ORDER BY b.depth",
        (part, BLOCK),
        limit=10_000,
    ).rows
    return [row[0] for row in rows]


def grow(store: Store, namespace: Namespace, tokens: np.ndarray) -> None:  # type: ignore[type-arg]
    """Store a chain as an engine does: a block a put, with all its parts; in many shards, however
    fast the puts come, so that there is something to compact."""
    for block in range(len(tokens) // BLOCK):
        parts = {
            spec.name: part_bytes(spec, tokens, block * BLOCK, (block + 1) * BLOCK)
            for spec in namespace.layout.parts
        }
        store.put(namespace, tokens[: (block + 1) * BLOCK], [Payload(block, parts)])
        if block % 8 == 7:
            store.flush()
    store.flush()


@pytest.mark.parametrize(("layout", "part"), [(WINDOWS, "kv:1"), (STATES, "state:1")])
def test_a_long_chain_keeps_its_blocks_and_thins_its_places(
    path: Path, layout: Layout, part: str
) -> None:
    tokens = random_tokens(1, 150 * BLOCK)
    with kvdb.open(path) as store:
        namespace = open_namespace(store, layout)
        grow(store, namespace, tokens)
        left = parts_left(store, part)
        assert len(left) < (110 if layout is WINDOWS else 40)
        assert left[-1] == 149
        match = store.match(namespace, tokens)
        assert match.matched == 150
        assert match.holes == ()
        assert match.miss_reason is None
        ((replaced, nbytes),) = store.sql(
            "SELECT count(*), sum(nbytes) FROM evictions WHERE reason = 'replaced' AND part = ?",
            (part,),
        ).rows
        assert replaced == 150 - len(left)
        assert nbytes == replaced * layout.by_name[part].nbytes(BLOCK)
        assert store.verify(data=True).ok
        before = store.info().bytes
        store.compact()
        assert store.info().bytes < before
        assert parts_left(store, part) == left
        assert store.verify(data=True).ok
    kvdb.rebuild(path)
    with kvdb.open(path) as store:
        assert store.verify(data=True).ok
        assert store.match(open_namespace(store, layout), tokens).matched == 150


def test_what_is_near_a_tip_a_fork_or_a_name_stays(path: Path) -> None:
    tokens = random_tokens(1, 150 * BLOCK)
    with kvdb.open(path) as store:
        namespace = open_namespace(store, WINDOWS)
        grow(store, namespace, tokens[: 77 * BLOCK])
        store.sequence(namespace, store.match(namespace, tokens[: 77 * BLOCK]).tip_hash, name="a")
        other = np.concatenate([tokens[: 51 * BLOCK], random_tokens(2, 2 * BLOCK)])
        put_all(store, namespace, other)
        grow(store, namespace, tokens)
        left = parts_left(store, "kv:1")
        # The window before a place is one whole block and three tokens of the one before.
        for depth in (75, 76, 49, 50, *range(120, 150)):
            assert depth in left
        assert 70 not in left or 69 not in left
        assert len(left) < 120


def test_a_tail_that_lost_its_state_goes_first(path: Path) -> None:
    """Turn after turn leaves a tail with a state; old ones become copies of what blocks hold."""
    tokens = random_tokens(1, 60 * BLOCK)
    with kvdb.open(path) as store:
        namespace = open_namespace(store, STATES)
        for turn in range(1, 60):
            put_all(store, namespace, tokens[: turn * BLOCK + 5])
            if turn == 10:
                tip = store.match(namespace, tokens[: turn * BLOCK + 5]).tip_hash
                store.sequence(namespace, tip, name="saved")
        tails = store.sql(
            "SELECT b.depth, b.last_access, (SELECT count(*) FROM parts WHERE block_id = b.id AND "
            "part LIKE 'state:%') FROM blocks AS b WHERE b.token_count = 5 ORDER BY b.depth"
        ).rows
        with_state = [depth for depth, _, states in tails if states]
        assert len(tails) == 59
        assert len(with_state) < 25
        assert with_state[-1] == 59
        assert 10 in with_state
        assert all((access == 0) == (not states) for _, access, states in tails)
        longer = np.concatenate([tokens[: 59 * BLOCK + 5], random_tokens(3, 9)])
        assert store.match(namespace, longer).shared is not None
        assert store.verify().ok
