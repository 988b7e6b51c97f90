"""The RAM tier: a second use comes from RAM, and whatever it holds or drops, reads stay true."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdb
from kvdb.prefetch import Wanted, stream_blocks
from kvdb.ramtier import NEVER, PartKey, RamTier
from kvdb.spread import Spreader
from kvdb.store import Store
from kvdb.writer import Payload
from tests.support import (
    BLOCK,
    MIXED,
    PLAIN,
    assert_true_state,
    buffers,
    check_prefix,
    open_namespace,
    part_bytes,
    payloads,
    put_all,
    random_tokens,
    shard_files,
)

ROOMY = 1 << 24
KV_BYTES = 2 * 2 * 2 * 4 * 4 * BLOCK  # of one PLAIN block


def restore(store: Store, tokens: Any) -> Any:
    """Read all of ``tokens`` and check every bit."""
    namespace = store.namespaces()[0]
    into = buffers(namespace.layout, len(tokens))
    result = store.read(store.match(namespace, tokens), into)
    assert not result.bad
    assert_true_state(namespace.layout, into, tokens, 0, len(tokens))
    for layers in into.values():  # what a live cache does to its memory reaches no one else
        for layer in layers:
            for array in layer:
                array[...] = 0
    return result


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("layout", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_a_block_is_served_from_ram_on_its_second_use(path: Path, codec: str, layout: Any) -> None:
    tokens = random_tokens(1, 4 * BLOCK + 5)
    with kvdb.open(path, codec=codec, ram=ROOMY) as store:
        namespace = open_namespace(store, layout)
        put_all(store, namespace, tokens)
        first = restore(store, tokens)
        raw = sum(
            part.nbytes(len(tokens)) for part in layout.parts if part.required and part.cuttable
        )
        assert (first.nbytes, first.ram_nbytes) == (0, raw)  # its first use was being put
    with kvdb.open(path, ram=ROOMY) as store:
        found = [restore(store, tokens) for _ in range(3)]
        assert [read.ram_nbytes for read in found] == [0, raw, raw]
        assert found[0].nbytes > 0 == found[1].nbytes
        assert store.info().ram.hit_nbytes == 2 * raw
        # Damage on disk after a part was let in is nobody's trouble while it stays.
        for file in shard_files(path):
            file.chmod(0o600)
            file.write_bytes(b"\0" * file.stat().st_size)
        assert restore(store, tokens).ram_nbytes == raw
        store.ram.clear()
        assert check_prefix(store, store.namespaces()[0], tokens) == 0
    with kvdb.open(path) as store:  # 0 is off
        assert store.ram.stats().misses == 0


def test_an_exact_twin_is_never_served_from_its_predecessor(path: Path) -> None:
    tokens = random_tokens(2, 2 * BLOCK)
    with kvdb.open(path, ram=ROOMY) as store:
        namespace = open_namespace(store)
        build = store.build(namespace, "b", {})
        spec = namespace.layout.by_name["kv:0"]
        inexact = [Payload(i, {"kv:0": np.full(spec.nbytes(BLOCK), 9, np.uint8)}) for i in range(2)]
        store.put(namespace, tokens, inexact).wait(30)
        store.put(
            namespace, tokens, payloads(namespace, tokens), exact=True, build_id=build.id
        ).wait(30)
        assert restore(store, tokens).ram_nbytes > 0


def test_payloads_that_were_let_in_cannot_be_changed(path: Path) -> None:
    tokens = random_tokens(3, BLOCK)
    with kvdb.open(path, ram=ROOMY) as store:
        namespace = open_namespace(store)
        (payload,) = payloads(namespace, tokens)
        store.put(namespace, tokens, [payload]).wait(30)
        with pytest.raises(ValueError, match="read-only"):
            payload.parts["kv:0"][0] = 1


@pytest.mark.parametrize("ram", [KV_BYTES, 3 * KV_BYTES])
def test_no_acknowledged_block_is_missed_between_ram_and_disk(path: Path, ram: int) -> None:
    """omlx#1232: a tiny tier evicts all the time while one thread puts and another gets."""
    chains = [random_tokens(seed, 3 * BLOCK) for seed in range(30)]
    acknowledged: list[Any] = []
    failures: list[str] = []
    with kvdb.open(path, ram=ram) as store:
        namespace = open_namespace(store)
        done = threading.Event()

        def get() -> None:
            number = 0
            while not done.is_set() or number < len(chains):
                if number < len(acknowledged):
                    if check_prefix(store, namespace, acknowledged[number]) != 3 * BLOCK:
                        failures.append(f"chain {number}")
                    number += 1

        reader = threading.Thread(target=get)
        reader.start()
        for tokens in chains:
            put_all(store, namespace, tokens)
            acknowledged.append(tokens)
        done.set()
        reader.join(60)
        assert not reader.is_alive()
        assert not failures
        assert store.ram.nbytes <= ram


def test_blocks_are_streamed_in_order_and_not_further_ahead_than_asked(path: Path) -> None:
    tokens = random_tokens(4, 9 * BLOCK)
    with kvdb.open(path, ram=4 * KV_BYTES, read_workers=2, read_ahead=1) as store:
        namespace = open_namespace(store)
        put_all(store, namespace, tokens)
        match = store.match(namespace, tokens)
        wanted = [Wanted(block, ["kv:0"]) for block in match.blocks]
        places = store.locate([block.id for block in match.blocks])
        spec = namespace.layout.by_name["kv:0"]
        for number, read in enumerate(stream_blocks(store, wanted, places)):
            assert read.parts is not None
            _, raw = read.parts["kv:0"]
            start = number * BLOCK
            assert bytes(raw) == bytes(part_bytes(spec, tokens, start, start + BLOCK))
    started: list[int] = []
    spreader = Spreader(2)
    stream = spreader.stream(lambda n: started.append(n) or n, range(100), 3)
    assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
    stream.close()
    spreader.close()
    assert len(started) <= 5 + 2 + 3


def key(number: int) -> PartKey:
    return PartKey(bytes([number]), "kv:0", b"")


def test_what_is_larger_than_the_budget_pushes_nothing_out() -> None:
    tier: RamTier[str] = RamTier(10)
    tier.put(key(1), "one", 6)
    tier.put(key(2), "two", 11)  # mlx-lm#1118
    assert (tier.get(key(1)), tier.get(key(2)), tier.nbytes) == ("one", None, 6)
    assert tier.resize(5) == 6


def test_a_chain_longer_than_the_budget_still_hits_at_its_front() -> None:
    tier: RamTier[int] = RamTier(5)
    hits = []
    for _ in range(4):
        tier.begin()
        hits.append(sum(tier.get(key(n)) is not None for n in range(10) if use(tier, n)))
    assert hits[1:] == [5, 5, 5]


def use(tier: RamTier[int], number: int) -> bool:
    if tier.get(key(number)) is None:
        tier.put(key(number), number, 1)
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("gpbw"), st.integers(0, 7), st.integers(1, 4)), max_size=80),
    st.integers(1, 12),
)
def test_it_keeps_what_a_plain_lru_2_keeps(steps: list[tuple[str, int, int]], budget: int) -> None:
    """Against a model that looks at all entries each time."""
    tier: RamTier[int] = RamTier(budget)
    held: dict[int, list[int]] = {}  # number → [before, last, nbytes]
    evicted: dict[int, int] = {}
    tick = 0
    for action, number, nbytes in steps:
        if action == "b":
            tier.begin()
            tick += 1
        elif action == "g":
            value = tier.get(key(number))
            assert value == (number if number in held else None)
            if number in held and held[number][1] != tick:
                held[number][:2] = [held[number][1], tick]
        else:
            if action == "w":
                wanted = tier.wants(key(number), nbytes)
            tier.put(key(number), number, nbytes)
            if number not in held and nbytes <= budget:
                seen = evicted.get(number, NEVER)
                rank = [seen if seen != tick else NEVER, tick]
                while sum(e[2] for e in held.values()) + nbytes > budget:
                    victim = min(held, key=lambda n: (held[n][:2], key(n)))
                    if held[victim][:2] >= rank:
                        evicted[number] = tick
                        break
                    evicted[victim] = held.pop(victim)[1]
                else:
                    held[number] = [*rank, nbytes]
                    evicted.pop(number, None)
                    assert action == "p" or wanted
        assert {n for n in range(8) if key(n) in tier} == held.keys()
        assert tier.nbytes == sum(e[2] for e in held.values()) <= budget
