"""The limit is hard, is remembered, and what goes first leaves usable prefixes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import kvdb
from kvdb.clock import Environment
from kvdb.history import RequestRecord
from kvdb.layout import LayerSpec, Layout, TensorSpec
from kvdb.opening import Options, open_store
from kvdb.store import Store
from kvdb.writer import Payload
from tests.support import (
    BLOCK,
    PLAIN,
    check_prefix,
    kv_layer,
    open_namespace,
    payloads,
    put_all,
    random_tokens,
    state_layer,
)

MIB = 1 << 20
# 256 KiB a block of 16 tokens.
BIG = Layout((LayerSpec("KVCache", (TensorSpec("keys", "F32", (1, 1, 4096), 2),)),))


def directory_bytes(path: Path) -> int:
    return sum(
        (Path(folder) / name).stat().st_size for folder, _, names in os.walk(path) for name in names
    )


def big_payloads(tokens: np.ndarray) -> list[Payload]:
    spec = BIG.by_name["kv:0"]
    return [
        Payload(index, {"kv:0": np.full(spec.nbytes(BLOCK), index, np.uint8)})
        for index in range(len(tokens) // BLOCK)
    ]


def test_the_directory_stays_under_the_limit_across_restarts_and_namespaces(path: Path) -> None:
    limit = 16 * MIB
    options: dict[str, object] = {"max_bytes": limit, "min_free_bytes": 0}
    peak = 0
    for round_ in range(3):
        with kvdb.open(path, **options) as store:
            assert store.limit.max_bytes == limit
            for weights in ("a", "b"):
                namespace = open_namespace(store, BIG, weights=weights)
                for seed in range(8):
                    tokens = random_tokens(100 * round_ + seed, 6 * BLOCK)
                    result = store.put(namespace, tokens, big_payloads(tokens)).wait(30)
                    assert result.dropped == 0
                    peak = max(peak, directory_bytes(path))
            assert store.verify(data=True).problems == []
        options = {}  # the next process is not told again
    assert peak <= limit
    assert peak > limit // 2


def test_one_block_larger_than_its_share_does_not_push_out_the_rest(path: Path) -> None:
    huge = Layout((LayerSpec("KVCache", (TensorSpec("keys", "F32", (1, 1, 1 << 17), 2),)),))
    with kvdb.open(path, max_bytes=16 * MIB, min_free_bytes=0) as store:
        namespace = open_namespace(store)
        tokens = random_tokens(1, 3 * BLOCK)
        put_all(store, namespace, tokens)
        other = open_namespace(store, huge)
        raw = np.zeros(huge.by_name["kv:0"].nbytes(BLOCK), np.uint8)
        result = store.put(other, tokens[:BLOCK], [Payload(0, {"kv:0": raw})]).wait(30)
        assert (result.stored, result.dropped, result.reason) == (0, 1, "too_large")
        assert check_prefix(store, namespace, tokens) == 3 * BLOCK
        store.flush()
        assert store.info().counters["blocks_too_large"] == 1


def test_a_state_larger_than_a_blocks_share_goes_without_its_block(path: Path) -> None:
    layout = Layout((kv_layer(), state_layer(2 << 20)))
    with kvdb.open(path, max_bytes=16 * MIB, min_free_bytes=0) as store:
        namespace = open_namespace(store, layout)
        tokens = random_tokens(1, BLOCK)
        put_all(store, namespace, tokens)
        match = store.match(namespace, tokens)
        assert match.complete
        assert set(match.blocks[0].parts) == {"kv:0"}
        assert store.info().counters["blocks_too_large"] == 0


def test_no_room_on_the_disk_stores_nothing_and_everything_else_works(path: Path) -> None:
    with kvdb.open(path) as store:
        put_all(store, open_namespace(store), random_tokens(1, BLOCK))
    with kvdb.open(path, min_free_bytes=1 << 60) as store:
        namespace = open_namespace(store)
        tokens = random_tokens(2, BLOCK)
        result = store.put(namespace, tokens, payloads(namespace, tokens)).wait(30)
        assert (result.dropped, result.reason) == (1, "disk_full")
        assert check_prefix(store, namespace, random_tokens(1, BLOCK)) == BLOCK
        assert store.evict(to_bytes=0).blocks == 1


def test_head_stays_before_tail_what_remains_of_half_a_chain_is_a_prefix(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(3, 8 * BLOCK)
    for end in range(BLOCK, 9 * BLOCK, BLOCK):  # one shard a block
        put_all(store, namespace, tokens[:end])
    report = store.evict(to_bytes=store.used_bytes() - 3000)
    assert 0 < report.blocks < 8
    match = store.match(namespace, tokens)
    assert match.holes == ()
    assert (
        match.token_count == (8 - report.blocks) * BLOCK == check_prefix(store, namespace, tokens)
    )


def test_a_dry_run_says_what_the_real_run_then_does(store: Store) -> None:
    namespace = open_namespace(store)
    for seed in range(6):
        put_all(store, namespace, random_tokens(seed, 3 * BLOCK))
    target = store.used_bytes() - 4000
    plan = store.evict(to_bytes=target, dry_run=True)
    assert store.info().live_blocks == 18
    real = store.evict(to_bytes=target)
    assert (plan.blocks, plan.nbytes, plan.freed_bytes) == (
        real.blocks,
        real.nbytes,
        real.freed_bytes,
    )
    assert store.evict(to_bytes=store.limit.max_bytes).blocks == 0


def test_eviction_of_one_namespace_leaves_the_others(store: Store) -> None:
    first, second = open_namespace(store, weights="a"), open_namespace(store, weights="b")
    tokens = random_tokens(1, 2 * BLOCK)
    put_all(store, first, tokens)
    put_all(store, second, tokens)
    store.evict(to_bytes=0, namespace_id=first.id)
    assert check_prefix(store, first, tokens) == 0
    assert check_prefix(store, second, tokens) == 2 * BLOCK


def test_recency_survives_a_restart(path: Path) -> None:
    old, new = random_tokens(1, BLOCK), random_tokens(2, BLOCK)
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        put_all(store, namespace, old)
        put_all(store, namespace, new)
        ids = tuple(block.id for block in store.match(namespace, old).blocks)
        store.record(RequestRecord(1, namespace.id, 16, 16, 0, 0, 1, "full", touched=ids))
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        store.evict(to_bytes=store.used_bytes() - 10)
        assert check_prefix(store, namespace, old) == BLOCK
        assert check_prefix(store, namespace, new) == 0


def test_references_of_one_request_count_once_and_a_second_request_makes_hot(
    store: Store,
) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(1, BLOCK)
    put_all(store, namespace, tokens)
    (block,) = store.match(namespace, tokens).blocks
    query = "SELECT queue FROM blocks"
    assert store.sql(query).rows == [("cold",)]
    store.record(
        RequestRecord(1, namespace.id, 16, 16, 0, 0, 1, "full", touched=(block.id, block.id))
    )
    store.flush()
    assert store.sql(query).rows == [("hot",)]


def test_a_sequence_past_its_time_holds_nothing(path: Path) -> None:
    now = [1_000_000]
    environment = Environment(now_us=lambda: now[0])
    with open_store(path, Options(), environment=environment) as store:
        namespace = open_namespace(store)
        tokens = random_tokens(1, BLOCK)
        put_all(store, namespace, tokens)
        tip = store.match(namespace, tokens).tip_hash
        store.sequence(namespace, tip, name="brief", ttl_seconds=5)
        assert store.evict(to_bytes=0).blocks == 0
        now[0] += 6_000_000
        assert store.evict(to_bytes=0).blocks == 1
        assert store.sql("SELECT count(*) FROM sequences").rows == [(0,)]


def test_history_of_requests_and_evictions_is_bounded(store: Store) -> None:
    with store.database.write() as connection:
        connection.execute("UPDATE settings SET value = '20' WHERE key LIKE 'history_%'")
    namespace = open_namespace(store)
    for seed in range(30):
        put_all(store, namespace, random_tokens(seed, BLOCK))
    store.evict(to_bytes=0)
    for _ in range(50):
        store.record(RequestRecord(1, namespace.id, 1, 0, 0, 1, 0, "none"))
    store.flush()
    for table in ("requests", "evictions"):
        assert store.sql(f"SELECT count(*) FROM {table}").rows == [(20,)]  # noqa: S608


@pytest.mark.parametrize("live", [0, 50])
def test_remembered_rows_number_at_most_twice_the_live_ones(store: Store, live: int) -> None:
    namespace = open_namespace(store)
    kept = [random_tokens(1000 + n, BLOCK) for n in range(live)]
    for tokens in kept:
        put_all(store, namespace, tokens)
        store.sequence(namespace, store.match(namespace, tokens).tip_hash)
    for batch in range(4):
        for seed in range(100):
            tokens = random_tokens(10_000 * batch + seed, BLOCK)
            store.put(namespace, tokens, payloads(namespace, tokens))
        store.flush()
        store.evict(to_bytes=0)
    info = store.info()
    assert info.live_blocks == live
    assert info.remembered_blocks <= 2 * max(live, 64)
    assert PLAIN.cuttable


def test_one_tenant_floods_only_itself(store: Store) -> None:
    identity = kvdb.ModelIdentity("w", "c")
    mine, other = (
        store.namespace(identity, PLAIN, block_tokens=BLOCK, salt=name.encode(), tenant=name)
        for name in ("mine", "other")
    )
    kept = random_tokens(1, 3 * BLOCK)
    put_all(store, mine, kept)
    block = PLAIN.by_name["kv:0"].nbytes(BLOCK) + PLAIN.by_name["logits"].nbytes(BLOCK)
    store.set_quota(10 * block, tenant="other")
    for seed in range(40):
        put_all(store, other, random_tokens(100 + seed, BLOCK))
    used = {row[0]: row[1] for row in store.sql("SELECT tenant, live_bytes FROM namespaces").rows}
    assert 5 * block < used["other"] <= 10 * block
    assert check_prefix(store, mine, kept) == 3 * BLOCK
    assert store.sql("SELECT DISTINCT reason FROM evictions").rows == [("quota",)]
    store.set_quota(block // 2, namespace=mine)
    tokens = random_tokens(2, BLOCK)
    result = store.put(mine, tokens, payloads(mine, tokens)).wait(30)
    assert (result.dropped, result.reason) == (1, "quota")
    store.set_quota(None, namespace=mine)
    put_all(store, mine, tokens)
    assert store.verify(data=True).problems == []
