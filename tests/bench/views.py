"""How long each documented view takes on a store of 1 M blocks and 100 K requests.

    python -m tests.bench.views [--blocks 1000000] [--requests 100000] [--rounds 5] [--store DIR]

The store is made by SQL in a minute or two, without payload files, which no view reads; with
``--store`` it is kept there, and used again. Each statement runs as kvdb's own tools run it: in the
sandbox, on a read-only connection, with at most 1,000 rows. One untimed run comes first. Ends with
1 when a statement that should answer within 200 ms does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvdb
from kvdb.driver import Connection
from kvdb.store import Store

BOUND_MS = 200.0
NAMESPACES = 4
TENANTS = 8
BLOCK_TOKENS = 256
# Each namespace has some system prompts, and on each stand many chains.
PROMPTS, PROMPT_BLOCKS = 25, 8
CHAIN_BLOCKS = 32
SEQUENCES = 100
REASONS = ("diverged", "not_stored", "evicted", "new_namespace", None)
DAY_US = 24 * 3600 * 1_000_000
DAYS = 92
SHARDS_A_DAY = 50
CHAINS_PER_TRANSACTION = 500
REQUESTS_PER_TRANSACTION = 10_000

# What is asked of views besides their first rows.
QUESTIONS = {
    "prefix_tree, upper levels": (
        "SELECT * FROM prefix_tree WHERE namespace_id = 1 AND depth <= 8 ORDER BY path"
    ),
    "prefix_tree, one root": (
        "SELECT * FROM prefix_tree WHERE namespace_id = 1 AND depth = 0 ORDER BY hits DESC"
    ),
    "block_usage, one level": (
        "SELECT * FROM block_usage WHERE namespace_id = 1 AND depth = 8 ORDER BY nbytes DESC"
    ),
    "hit_history, newest": "SELECT * FROM hit_history ORDER BY id DESC",
    "hit_history, count": "SELECT count(*) FROM hit_history",
    "sequence_blocks, count": "SELECT count(*) FROM sequence_blocks",
    "missed_prefixes, count": "SELECT count(*) FROM missed_prefixes",
}
# Whole tables are read: capacity and tenant_usage have kept totals.
SLOW = {
    "hit_history, by tenant": (
        "SELECT tenant, count(*), avg(ttft_ms) FROM hit_history GROUP BY tenant"
    ),
    "block_usage, all": "SELECT model, count(*), sum(nbytes) FROM block_usage GROUP BY model",
    "prefix_tree, count": "SELECT count(*) FROM prefix_tree",
}


def fill(store: Store, blocks: int, requests: int) -> None:
    """Rows of ``blocks`` blocks, some sequences, and ``requests`` requests over three months."""
    with store.database.write() as connection:
        connection.executemany(
            "INSERT INTO namespaces (id, fingerprint, model, identity, layout, block_tokens, "
            "salt, created_at, used_at) VALUES (?, ?, ?, '{}', '{}', ?, x'', 0, 0)",
            [(n, n.to_bytes(32), f"model-{n}", BLOCK_TOKENS) for n in range(1, NAMESPACES + 1)],
        )
    ids = iter(range(1, 1 << 40))
    tips = []
    for prompt in range(NAMESPACES * PROMPTS):
        with store.database.write() as connection:
            tips.append(_add_chain(connection, ids, prompt, None, 0, PROMPT_BLOCKS))
    chains = max((blocks - len(tips) * PROMPT_BLOCKS) // CHAIN_BLOCKS, SEQUENCES)
    ends = []
    for first in range(0, chains, CHAINS_PER_TRANSACTION):
        with store.database.write() as connection:
            for chain in range(first, min(first + CHAINS_PER_TRANSACTION, chains)):
                prompt = chain % len(tips)
                ends.append(
                    _add_chain(connection, ids, prompt, tips[prompt], PROMPT_BLOCKS, CHAIN_BLOCKS)
                )
        if len(ends) % 10_000 == 0:
            print(f"{len(ends)} of {chains} chains", file=sys.stderr)
    with store.database.write() as connection:
        connection.executemany(
            "INSERT INTO sequences (name, namespace_id, tip_id, created_at) "
            "SELECT ?1, namespace_id, id, 0 FROM blocks WHERE id = ?2",
            [(f"agent-{n}", ends[n * len(ends) // SEQUENCES]) for n in range(SEQUENCES)],
        )
    random = np.random.default_rng(1)
    start = time.time_ns() // 1000 - DAYS * DAY_US
    with store.database.write() as connection:
        _add_days(connection, start)
    for first in range(0, requests, REQUESTS_PER_TRANSACTION):
        count = min(REQUESTS_PER_TRANSACTION, requests - first)
        with store.database.write() as connection:
            at = start + first * (DAYS * DAY_US // requests)
            _add_requests(connection, random, at, DAYS * DAY_US // requests, count, tips, ends)


def _add_chain(
    connection: Connection,
    ids: Iterator[int],
    prompt: int,
    parent: int | None,
    depth: int,
    count: int,
) -> int:
    """Blocks under ``parent`` with a shard of their own; the id of the last."""
    namespace = prompt % NAMESPACES + 1
    (shard,) = connection.execute(
        "INSERT INTO shards (uuid, state, namespace_id, nbytes, part_bytes, created_at) "
        "VALUES (lower(hex(randomblob(16))), 'live', ?, ?, ?, 0) RETURNING id",
        (namespace, count * 65536, count * 65536),
    ).fetchone()
    rows = []
    for level in range(depth, depth + count):
        id_ = next(ids)
        refs = 1 if level < depth + count - 1 else 0
        rows.append((id_, parent, namespace, level, BLOCK_TOKENS, refs))
        parent = id_
    connection.executemany(
        "INSERT INTO blocks (id, hash, parent_id, namespace_id, depth, token_count, refs, state, "
        "queue, origin, exact, created_at, last_access, prev_access) "
        "VALUES (?, randomblob(32), ?, ?, ?, ?, ?, 'live', 'cold', 'prefill', 0, 0, 0, 0)",
        rows,
    )
    connection.executemany(
        "INSERT INTO parts VALUES (?, 'kv:0', ?, ?, 65536, 65536, 'raw', zeroblob(16))",
        [(row[0], shard, number * 65536) for number, row in enumerate(rows)],
    )
    assert parent is not None
    return parent


def _add_days(connection: Connection, start: int) -> None:
    """What went and what was written, day by day."""
    for day in range(DAYS):
        at = start + day * DAY_US
        connection.executemany(
            "INSERT INTO evictions (evicted_at, namespace_id, block_hash, depth, token_count, "
            "reason, nbytes) VALUES (?, ?, randomblob(32), 9, ?, ?, 65536)",
            [
                (at, number % NAMESPACES + 1, BLOCK_TOKENS, ("limit", "quota")[number % 2])
                for number in range(1000)
            ],
        )
        connection.executemany(
            "INSERT INTO write_totals VALUES (?, ?, ?, ?)",
            [(at, n, SHARDS_A_DAY, SHARDS_A_DAY << 26) for n in range(1, NAMESPACES + 1)],
        )


def _add_requests(
    connection: Connection,
    random: np.random.Generator,
    start: int,
    step: int,
    count: int,
    tips: list[int],
    ends: list[int],
) -> None:
    rows: list[tuple[Any, ...]] = []
    for number in range(count):
        computed, restored = int(random.integers(1, 4000)), int(random.integers(0, 30_000))
        reason = REASONS[int(random.integers(len(REASONS)))]
        computed = 0 if reason is None else computed
        rows.append(
            (
                start + number * step,
                int(random.integers(NAMESPACES)) + 1,
                f"tenant-{int(random.integers(TENANTS))}",
                restored + computed,
                restored,
                computed,
                "full" if reason is None else "partial",
                reason,
                # Half of the misses are behind a system prompt, half behind any block.
                tips[int(random.integers(len(tips)))]
                if number % 2
                else ends[int(random.integers(len(ends)))] - int(random.integers(CHAIN_BLOCKS)),
                computed * 0.5,
                restored * 0.01,
            )
        )
    connection.executemany(
        "INSERT INTO requests (started_at, namespace_id, tenant, prompt_tokens, restored_tokens, "
        "refilled_tokens, computed_tokens, generated_tokens, skip, miss_reason, deepest_block_id, "
        "load_ms, warmup_ms, lookup_ms, prefill_ms, restore_ms, first_sample_ms, behind_ms) "
        "VALUES (?, ?, ?, ?, ?, 0, ?, 100, ?, ?, ?, 0, 0.1, 2, ?, ?, 1, 0)",
        rows,
    )


def measure(store: Store, sql: str, rounds: int) -> float:
    """Median milliseconds, after an untimed run."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        store.sql(sql, deadline=120)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.store or Path(folder) / "store"
        if not path.exists():
            with kvdb.open(path, max_bytes=1 << 40, min_free_bytes=0) as store:
                fill(store, options.blocks, options.requests)
        with kvdb.open(path, read_only=True) as store:
            names = [
                name
                for (name,) in store.sql(
                    "SELECT name FROM sqlite_schema WHERE type = 'view' ORDER BY name"
                ).rows
            ]
            asked = {name: f"SELECT * FROM {name}" for name in names} | QUESTIONS  # noqa: S608
            fast = {name: measure(store, sql, options.rounds) for name, sql in asked.items()}
            slow = {name: measure(store, sql, 1) for name, sql in SLOW.items()}
    json.dump(
        {
            "blocks": options.blocks,
            "requests": options.requests,
            "median_ms": {name: round(value, 2) for name, value in fast.items()},
            "unbounded_ms": {name: round(value) for name, value in slow.items()},
        },
        sys.stdout,
        indent=2,
    )
    print()
    late = [name for name, value in fast.items() if value > BOUND_MS]
    if late:
        sys.exit(f"Above {BOUND_MS:.0f} ms: {', '.join(late)}.")


if __name__ == "__main__":
    main()
