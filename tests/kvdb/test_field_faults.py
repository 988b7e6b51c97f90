"""Faults that users of other caches reported, each as a small case of its kind."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import kvdb
from kvdb.clock import Environment
from kvdb.opening import Options, open_store
from kvdb.store import Store
from tests.support import (
    BLOCK,
    MIXED,
    PLAIN,
    buffers,
    check_prefix,
    open_namespace,
    payloads,
    put_all,
    random_tokens,
    shard_files,
)


def test_opening_one_model_destroys_no_other_models_data(path: Path) -> None:
    tokens = [random_tokens(seed, 3 * BLOCK) for seed in range(4)]
    with kvdb.open(path) as store:
        first = open_namespace(store, weights="a")
        for chain in tokens:
            put_all(store, first, chain)
    (path / "tmp" / "stray.safetensors").write_bytes(b"left by somebody")
    with kvdb.open(path) as store:
        second = open_namespace(store, MIXED, weights="b")
        put_all(store, second, random_tokens(9, 3 * BLOCK))
    with kvdb.open(path) as store:
        first = open_namespace(store, weights="a")
        assert all(check_prefix(store, first, chain) == 3 * BLOCK for chain in tokens)
        assert store.sql("SELECT count(*) FROM shards WHERE uuid = 'stray'").rows == [(0,)]


def test_silent_orphaning_by_another_block_size_is_visible_and_can_be_purged(path: Path) -> None:
    tokens = random_tokens(1, 64)
    with kvdb.open(path) as store:
        put_all(store, open_namespace(store, block_tokens=16), tokens)
    with kvdb.open(path) as store:
        put_all(store, open_namespace(store, block_tokens=32), tokens)
        rows = store.sql("SELECT namespace_id, block_tokens, live_blocks FROM capacity").rows
        assert [(size, live) for _, size, live in rows] == [(16, 4), (32, 2)]
        assert store.evict(to_bytes=0, namespace_id=rows[0][0]).blocks == 4
        assert check_prefix(store, open_namespace(store, block_tokens=32), tokens) == 64


def test_a_failed_load_breaks_no_neighbour_and_drops_its_row_once(store: Store) -> None:
    namespace = open_namespace(store)
    shared = random_tokens(1, 3 * BLOCK)
    for end in range(BLOCK, 4 * BLOCK, BLOCK):
        put_all(store, namespace, shared[:end])
    middle = store.match(namespace, shared).blocks[1]
    place = store.locate([middle.id])[middle.id, "kv:0"]
    file = next(f for f in shard_files(store.path) if f.stem == place.shard)
    file.chmod(0o600)
    with file.open("r+b") as handle:
        handle.seek(place.offset)
        handle.write(b"\xff\xff\xff\xff")
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(check_prefix(store, namespace, shared)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [BLOCK] * 4
    assert store.sql("SELECT reason FROM evictions").rows == [("damaged",)]
    put_all(store, namespace, shared)
    assert check_prefix(store, namespace, shared) == 3 * BLOCK


def test_the_checksum_is_skipped_on_a_second_read_but_never_after_the_file_changed(
    store: Store,
) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(1, BLOCK)
    put_all(store, namespace, tokens)
    match = store.match(namespace, tokens)
    place = store.locate([match.blocks[0].id])[match.blocks[0].id, "kv:0"]
    assert store.read(match, buffers(PLAIN, BLOCK)).bad == ()
    with store.reader._descriptor(place.shard) as shard:
        assert place in shard.verified
    (file,) = shard_files(store.path)
    times = file.stat()
    file.chmod(0o600)
    with file.open("r+b") as handle:
        handle.seek(place.offset)
        handle.write(b"\xff\xff\xff\xff")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as if nothing had happened
    assert store.read(match, buffers(PLAIN, BLOCK)).bad == (0,)


def test_a_clock_that_jumps_back_or_stands_still_changes_no_order(path: Path) -> None:
    now = [2_000_000_000_000_000]
    environment = Environment(now_us=lambda: now[0])
    with open_store(path, Options(), environment=environment) as store:
        namespace = open_namespace(store)
        chains = [random_tokens(seed, BLOCK) for seed in range(6)]
        for n, tokens in enumerate(chains):
            put_all(store, namespace, tokens)
            if n == 2:
                now[0] -= 365 * 24 * 3600 * 1_000_000
        used = store.used_bytes()
        store.evict(to_bytes=used - 1)
        assert [check_prefix(store, namespace, tokens) for tokens in chains] == [0] + [BLOCK] * 5
        assert store.verify(data=True).problems == []


def test_blocks_of_another_layout_count_in_the_limit(path: Path) -> None:
    with kvdb.open(path, max_bytes=16 << 20, min_free_bytes=0) as store:
        for layout, seeds in ((PLAIN, range(200)), (MIXED, range(200))):
            namespace = open_namespace(store, layout)
            for seed in seeds:
                tokens = random_tokens(seed, 4 * BLOCK)
                store.put(namespace, tokens, payloads(namespace, tokens))
        store.flush()
        total = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        assert total <= 16 << 20
        shards = sum(-(-f.stat().st_size // 4096) * 4096 for f in shard_files(path))
        assert store.info().shard_bytes == shards
