"""Forks are one row, growing a shared tail copies, and references agree with what holds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvdb
from kvdb.errors import StoreMissing, UsageError
from kvdb.store import Store
from tests.support import (
    BLOCK,
    PLAIN,
    check_prefix,
    open_namespace,
    part_bytes,
    put_all,
    random_tokens,
    shard_files,
)


def test_fork_a_hundred_times_at_a_tail_and_extend_each(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(1, 3 * BLOCK + 5)
    put_all(store, namespace, tokens)
    tip = store.match(namespace, tokens).tip_hash
    original = store.sequence(namespace, tip, name="original")
    size = sum(file.stat().st_size for file in shard_files(store.path))
    forks = [original.fork(f"fork {n}") for n in range(100)]
    assert sum(file.stat().st_size for file in shard_files(store.path)) == size
    assert store.sql("SELECT refs FROM blocks WHERE hash = ?", [tip]).rows == [(101,)]
    spec = PLAIN.by_name["kv:0"]
    for n, fork in enumerate(forks):
        grown = np.append(tokens, np.uint32(9000 + n))
        own = part_bytes(spec, grown, len(tokens), len(grown))
        assert fork.append([9000 + n], {"kv:0": own}).stored == 1
        assert np.array_equal(fork.tokens(), grown)
    assert store.info().counters["cow_copies"] == 100
    assert original.tip_hash == tip
    assert store.sql("SELECT refs FROM blocks WHERE hash = ?", [tip]).rows == [(1,)]
    assert check_prefix(store, namespace, tokens) == len(tokens)
    for n in range(100):
        grown = np.append(tokens, np.uint32(9000 + n))
        assert check_prefix(store, namespace, grown) == len(grown)
    assert store.verify(data=True).problems == []
    for sequence in (*forks, original):
        sequence.drop()
    assert store.sql("SELECT sum(refs) FROM blocks WHERE depth = 3").rows == [(0,)]
    assert store.verify(data=True).problems == []


def test_growing_an_unshared_tail_copies_nothing_for_others(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(2, BLOCK + 3)
    put_all(store, namespace, tokens)
    only = store.sequence(namespace, store.match(namespace, tokens).tip_hash)
    grown = np.concatenate([tokens, random_tokens(3, 2 * BLOCK)])
    own = part_bytes(PLAIN.by_name["kv:0"], grown, len(tokens), len(grown))
    only.append(grown[len(tokens) :], {"kv:0": own})
    assert store.info().counters["cow_copies"] == 0
    assert check_prefix(store, namespace, grown) == len(grown)
    # The tail that the longer block now contains is the first victim.
    assert store.sql("SELECT last_access FROM blocks WHERE token_count = 3 AND depth = 1").rows == [
        (0,)
    ]


def test_an_empty_sequence_grows_from_nothing(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(4, BLOCK + 2)
    sequence = store.sequence(namespace, None, name="fresh")
    assert sequence.tip_hash is None
    own = part_bytes(PLAIN.by_name["kv:0"], tokens, 0, len(tokens))
    assert sequence.append(tokens, {"kv:0": own}).stored == 2
    assert check_prefix(store, namespace, tokens) == len(tokens)
    with pytest.raises(UsageError, match="must hold"):
        sequence.append([1], {})


def test_what_a_sequence_holds_is_not_evicted_and_a_dropped_one_is(store: Store) -> None:
    namespace = open_namespace(store)
    held, free = random_tokens(5, 3 * BLOCK), random_tokens(6, 3 * BLOCK)
    for tokens in (held, free):
        put_all(store, namespace, tokens)
    sequence = store.sequence(namespace, store.match(namespace, held).tip_hash, name="kept")
    report = store.evict(to_bytes=0)
    assert report.blocks == 3
    assert check_prefix(store, namespace, held) == 3 * BLOCK
    assert check_prefix(store, namespace, free) == 0
    assert store.match(namespace, free).miss_reason == "evicted"
    sequence.drop()
    sequence.drop()
    assert store.evict(to_bytes=0).blocks == 3
    assert shard_files(store.path) == []
    assert store.verify(data=True).problems == []


def test_names_are_unique_survive_a_restart_and_dropped_handles_say_so(path: Path) -> None:
    tokens = random_tokens(7, 2 * BLOCK)
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        put_all(store, namespace, tokens)
        tip = store.match(namespace, tokens).tip_hash
        store.sequence(namespace, tip, name="agent")
        with pytest.raises(UsageError, match="already"):
            store.sequence(namespace, tip, name="agent")
        with pytest.raises(StoreMissing):
            store.sequence(namespace, bytes(32), name="nothing")
        running = store.sequence(namespace, tip)
        gone = store.sequence(namespace, tip)
        gone.drop()
        with pytest.raises(StoreMissing):
            _ = gone.tip_hash
        assert running.tip_hash == tip
    with kvdb.open(path) as store:
        # The running one ended with its process; the named one has no owner.
        assert store.sql("SELECT name FROM sequences").rows == [("agent",)]
        assert store.sql("SELECT refs FROM blocks WHERE depth = 1").rows == [(1,)]


def test_a_thousand_aborted_leases_leave_no_reference(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(8, 2 * BLOCK)
    put_all(store, namespace, tokens)
    for _ in range(1000):
        with store.lease(namespace, tokens[: BLOCK + 1]):
            pass
    assert store.sql("SELECT max(refs) FROM blocks WHERE depth = 1").rows == [(0,)]
    assert store.evict(to_bytes=0).blocks == 2
