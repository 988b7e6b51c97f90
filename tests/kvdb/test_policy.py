"""The retention in SQL decides as its reference over dicts does, and both beat plain LRU."""

from __future__ import annotations

import numpy as np
import pytest

from kvdb import index
from kvdb.driver import immediate
from kvdb.simulate.sql_policy import SqlPolicy, key_hash
from tests.kvdb.reference_policy import Retention as Reference

CAPACITY = 80


def conversations(seed: int, requests: int) -> list[list[int]]:
    """Growing conversations of uneven popularity, each over one of three system prompts."""
    random = np.random.default_rng(seed)
    heads = [[1000 * h + n for n in range(int(random.integers(2, 6)))] for h in range(3)]
    lengths = [1] * 60
    made = []
    for _ in range(requests):
        which = min(int(random.zipf(1.3)) - 1, 59)
        lengths[which] += int(random.integers(0, 2))
        own = [10_000 + 100 * which + n for n in range(min(lengths[which], 12))]
        made.append(heads[which % 3] + own)
    return made


@pytest.mark.parametrize("seed", [1, 2])
def test_sql_and_reference_keep_the_same_blocks(seed: int) -> None:
    sql, reference = SqlPolicy(CAPACITY), Reference(CAPACITY)
    for chain in conversations(seed, 250):
        assert sql.request(chain) == reference.request(chain)
    assert index.counters(sql.connection)["age_ratio"] == reference.age_ratio
    kept = {key_hash(key) for key, row in reference.by_key.items() if row.state == "live"}  # type: ignore[call-overload]
    assert sql.live_hashes() == kept
    assert reference.history > 0
    sql.close()


def test_the_cache_beats_plain_lru_where_scans_flood_it() -> None:
    random = np.random.default_rng(3)
    trace = []
    for scan in range(3000):
        hot = int(random.integers(0, 40))
        trace.append([hot, 100 + hot])
        trace.append([100_000 + 3 * scan, 100_001 + 3 * scan, 100_002 + 3 * scan])
    policy, lru = Reference(CAPACITY), Reference(CAPACITY)
    lru._learn = lambda ghost: None  # type: ignore[method-assign]
    lru.age_ratio = 1 << 20
    hits = [sum(p.request(chain) for chain in trace) for p in (policy, lru)]
    assert hits[0] > 1.5 * hits[1]


def test_a_transaction_that_fails_leaves_the_index_as_it_was() -> None:
    policy = SqlPolicy(CAPACITY)
    policy.request([1, 2, 3])
    before = policy.live_hashes()
    with pytest.raises(KeyError), immediate(policy.connection) as connection:  # noqa: PT012 - the block is the case
        policy._request(connection, [4, 5])
        raise KeyError("anything")
    assert policy.live_hashes() == before
    assert index.counters(policy.connection)["tick"] == 1
    policy.close()
