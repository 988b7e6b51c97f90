"""put, match, read: what goes in comes out, and nothing else does."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import kvdb
from kvdb.errors import StoreClosed, StoreReadOnly, UsageError
from kvdb.identity import ExtraKey
from kvdb.layout import Layout
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


@pytest.mark.parametrize("layout", [PLAIN, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("codec", ["raw", "lz4", "zstd"])
@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_what_is_read_is_what_was_put(path: Path, layout: Layout, codec: str, count: int) -> None:
    tokens = random_tokens(count, count)
    with kvdb.open(path, codec=codec) as store:
        put_all(store, open_namespace(store, layout), tokens)
    with kvdb.open(path) as store:
        namespace = open_namespace(store, layout)
        assert check_prefix(store, namespace, tokens) == count
        match = store.match(namespace, tokens)
        assert match.complete
        assert match.miss_reason is None
        assert match.logits is not None
        raw = store.read_part(match.logits)
        assert raw is not None
        want = part_bytes(layout.by_name["logits"], tokens, match.blocks[-1].start, count)
        assert raw.tobytes() == want.tobytes()
        assert store.verify(data=True).problems == []


def test_shared_tail_within_a_block_and_a_shorter_stored_tail(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(1, 2 * BLOCK + 9)
    put_all(store, namespace, tokens)
    diverged = tokens.copy()
    diverged[2 * BLOCK + 5] += 1
    assert check_prefix(store, namespace, diverged) == 2 * BLOCK + 5
    assert store.match(namespace, diverged).miss_reason == "diverged"
    longer = np.concatenate([tokens, random_tokens(2, 40)])
    assert check_prefix(store, namespace, longer) == len(tokens)
    assert store.match(namespace, longer).miss_reason == "not_stored"
    early = tokens.copy()
    early[3] += 1
    assert check_prefix(store, namespace, early) == 3


def test_a_tail_that_ends_in_a_state_is_shared_whole_or_not_at_all(store: Store) -> None:
    namespace = open_namespace(store, MIXED)
    tokens = random_tokens(1, BLOCK + 9)
    put_all(store, namespace, tokens)
    longer = np.concatenate([tokens, tokens])
    assert check_prefix(store, namespace, longer) == BLOCK + 9
    diverged = longer.copy()
    diverged[BLOCK + 8] += 1
    assert check_prefix(store, namespace, diverged) == BLOCK
    # Not beyond the last token, whose logits the tail does not hold.
    assert store.match(namespace, longer[: BLOCK + 9]).shared is None


def test_the_deepest_state_is_found_beside_deeper_blocks(store: Store) -> None:
    """Blocks go on without states; a tail under an earlier one ends in the last state there is."""
    namespace = open_namespace(store, MIXED)
    tokens = random_tokens(1, 4 * BLOCK)
    put_all(store, namespace, tokens[: BLOCK + 9])
    store.put(namespace, tokens, payloads(namespace, tokens, optional=False)).wait()
    match = store.match(namespace, np.concatenate([tokens, tokens]))
    assert match.matched == 4
    assert match.shared is not None
    assert (match.shared.block.start, match.shared.token_count) == (BLOCK, 9)
    put_all(store, namespace, tokens[: 2 * BLOCK])  # now a block end further on has its state
    again = store.match(namespace, np.concatenate([tokens, tokens]))
    assert again.shared is None
    assert "state:1" in again.blocks[1].parts


def test_equal_puts_write_nothing_twice(path: Path) -> None:
    tokens = random_tokens(4, 5 * BLOCK)
    sizes = []
    for _ in range(3):
        with kvdb.open(path) as store:
            namespace = open_namespace(store)
            result = store.put(namespace, tokens, payloads(namespace, tokens)).wait(30)
            sizes.append((sum(file.stat().st_size for file in shard_files(path)), result.present))
    assert [present for _, present in sizes] == [0, 5, 5]
    assert len({size for size, _ in sizes}) == 1


def test_optional_parts_can_be_added_later(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(5, 2 * BLOCK)
    store.put(namespace, tokens, payloads(namespace, tokens, optional=False)).wait(30)
    assert store.match(namespace, tokens).logits is None
    logits = part_bytes(PLAIN.by_name["logits"], tokens, BLOCK, 2 * BLOCK)
    result = store.put(namespace, tokens, [Payload(1, {"logits": logits})]).wait(30)
    assert (result.stored, result.dropped) == (1, 0)
    found = store.match(namespace, tokens).logits
    assert found is not None
    raw = store.read_part(found)
    assert raw is not None
    assert raw.tobytes() == logits.tobytes()


def test_a_block_without_its_parent_is_dropped_and_said(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(6, 3 * BLOCK)
    result = store.put(namespace, tokens, payloads(namespace, tokens, first=2)).wait(30)
    assert (result.stored, result.dropped, result.reason) == (0, 1, "parent_missing")
    assert store.match(namespace, tokens).blocks == ()


def test_a_full_queue_drops_the_rest_of_the_chain_never_a_middle_block(path: Path) -> None:
    tokens = random_tokens(7, 10 * BLOCK)
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        block = payloads(namespace, tokens)[0].nbytes
    with kvdb.open(path, queue_bytes=int(2.5 * block)) as store:
        namespace = open_namespace(store)
        result = store.put(namespace, tokens, payloads(namespace, tokens)).wait(30)
        assert (result.stored, result.dropped, result.reason) == (2, 8, "queue_full")
        assert check_prefix(store, namespace, tokens) == 2 * BLOCK
        store.flush()
        assert store.info().counters["blocks_dropped"] == 8


def test_exact_blocks_replace_inexact_ones_and_are_all_that_exact_mode_sees(store: Store) -> None:
    namespace = open_namespace(store)
    build = store.build(namespace, "build-1", {})
    other = store.build(namespace, "build-2", {})
    assert (build.verdict, other.verdict) == ("compatible", "unchecked")
    tokens = random_tokens(8, 3 * BLOCK)
    put_all(store, namespace, tokens)
    match = store.match(namespace, tokens, exact_build=build.id)
    assert (match.live_prefix_tokens, match.miss_reason) == (0, "inexact")
    shared = payloads(namespace, tokens)
    store.put(namespace, tokens, shared, exact=True, build_id=build.id).wait(30)
    match = store.match(namespace, tokens, exact_build=build.id)
    assert match.live_prefix_tokens == len(tokens)
    assert match.miss_reason is None
    assert store.match(namespace, tokens, exact_build=other.id).live_prefix_tokens == 0
    assert check_prefix(store, namespace, tokens) == len(tokens)
    assert store.verify(data=True).problems == []


def test_what_replaced_a_matched_block_is_not_read_for_it(store: Store) -> None:
    """Another build's exact twin, stored between the match and the read."""
    namespace = open_namespace(store)
    build = store.build(namespace, "build-1", {})
    other = store.set_verdict(store.build(namespace, "build-2", {}), True, 0.5)
    tokens = random_tokens(8, 3 * BLOCK)
    made = payloads(namespace, tokens)
    store.put(namespace, tokens, made, exact=True, build_id=build.id).wait(30)
    lease = store.lease(namespace, tokens, exact_build=build.id)
    match = lease.match
    assert match.live_prefix_tokens == len(tokens)
    theirs = store.put(namespace, tokens[:BLOCK], made[:1], exact=True, build_id=other.id)
    assert theirs.wait(30).stored == 1
    into = buffers(namespace.layout, len(tokens))
    assert store.read(match, into).bad == (0,)
    names = match.blocks[0].parts
    assert all(store.read_part(part, match.blocks[0]) is None for part in names.values())
    assert all(
        store.read_part(part, match.blocks[1]) is not None
        for part in match.blocks[1].parts.values()
    )
    lease.release()


def test_another_image_in_a_block_is_another_block(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(9, 2 * BLOCK + 4)
    for digest in (b"cat", b"dog"):
        keys = [ExtraKey(BLOCK + 2, digest)]
        made = payloads(namespace, tokens)
        assert store.put(namespace, tokens, made, extra_keys=keys).wait(30).dropped == 0
    match = store.match(namespace, tokens, extra_keys=[ExtraKey(BLOCK + 2, b"owl")])
    assert match.token_count == BLOCK
    assert match.shared is None
    assert store.match(namespace, tokens, extra_keys=[ExtraKey(BLOCK + 2, b"dog")]).complete


def test_namespaces_do_not_share(store: Store) -> None:
    tokens = random_tokens(10, 2 * BLOCK)
    put_all(store, open_namespace(store), tokens)
    for other in (
        open_namespace(store, weights="other"),
        open_namespace(store, salt=b"tenant"),
        open_namespace(store, block_tokens=32),
        open_namespace(store, MIXED),
    ):
        match = store.match(other, tokens)
        assert (match.token_count, match.shared, match.miss_reason) == (0, None, "new_namespace")


def test_damage_to_the_payload_is_a_miss_and_a_row_never_other_bytes(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(11, 4 * BLOCK)
    for end in range(BLOCK, 5 * BLOCK, BLOCK):  # one shard each
        put_all(store, namespace, tokens[:end])
    third = store.match(namespace, tokens).blocks[2]
    location = store.locate([third.id])[third.id, "kv:0"]
    file = next(f for f in shard_files(store.path) if f.stem == location.shard)
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    data[location.offset + 5] ^= 4
    file.write_bytes(data)
    assert check_prefix(store, namespace, tokens) == 2 * BLOCK
    match = store.match(namespace, tokens)
    assert (match.holes, match.miss_reason, match.complete) == ((2,), "damaged", True)
    rows = store.sql("SELECT part, reason FROM evictions").rows
    assert rows == [("kv:0", "damaged")]
    # A refill puts the hole back.
    result = store.put(namespace, tokens[: 3 * BLOCK], payloads(namespace, tokens[: 3 * BLOCK], 2))
    assert result.wait(30).stored == 1
    assert check_prefix(store, namespace, tokens) == 4 * BLOCK


@pytest.mark.parametrize("harm", ["delete", "empty", "header", "half", "swap"])
def test_torn_missing_or_swapped_files_are_misses(path: Path, harm: str) -> None:
    tokens, others = random_tokens(12, 3 * BLOCK), random_tokens(13, 3 * BLOCK)
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        put_all(store, namespace, tokens)
        put_all(store, namespace, others)
    first, second = shard_files(path)
    for file in (first, second):
        file.chmod(0o600)
    data = first.read_bytes()
    if harm == "delete":
        first.unlink()
    elif harm == "swap":
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)
    else:
        size = {"empty": 0, "header": 64, "half": len(data) // 2}[harm]
        first.write_bytes(data[:size])
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        found = [check_prefix(store, namespace, t) for t in (tokens, others)]
        assert min(found) < 3 * BLOCK
        assert max(found) == (0 if harm == "swap" else 3 * BLOCK)
        put_all(store, namespace, tokens)
        put_all(store, namespace, others)
        assert check_prefix(store, namespace, tokens) == 3 * BLOCK
        store.verify(data=True, repair=True)
        assert store.verify(data=True).problems == []


def test_readers_and_a_writer_in_threads_see_old_new_or_nothing(store: Store) -> None:
    namespace = open_namespace(store)
    chains = [random_tokens(seed, 6 * BLOCK + seed) for seed in range(12)]
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(6):
                for tokens in chains:
                    check_prefix(store, namespace, tokens)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    tickets = [store.put(namespace, t, payloads(namespace, t)) for t in chains]
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert all(ticket.wait(30).dropped == 0 for ticket in tickets)
    assert all(check_prefix(store, namespace, t) == len(t) for t in chains)


def test_a_put_array_is_stored_as_it_was(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(14, BLOCK)
    made = payloads(namespace, tokens)
    store.put(namespace, tokens, made).wait(30)
    for part in made[0].parts.values():
        part[:] = 0
    assert check_prefix(store, namespace, tokens) == BLOCK


def test_bad_payloads_and_buffers_are_refused_at_once(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(15, 2 * BLOCK)
    good = payloads(namespace, tokens)
    for bad in (
        [],
        [Payload(0, good[0].parts)],
        [Payload(1, {})],
        [Payload(1, {"kv:9": good[1].parts["kv:0"]})],
        [Payload(1, {"kv:0": good[1].parts["kv:0"][:-1]})],
    ):
        with pytest.raises(UsageError):
            store.put(namespace, tokens, bad)
    put_all(store, namespace, tokens)
    match = store.match(namespace, tokens)
    with pytest.raises(UsageError, match="Buffer"):
        store.read(match, buffers(PLAIN, BLOCK))
    with pytest.raises(UsageError, match="Only parts"):
        store.read(match, {"logits": []})


def test_reading_chosen_blocks_leaves_the_rest_of_the_buffers_alone(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(16, 4 * BLOCK)
    put_all(store, namespace, tokens)
    into, untouched = buffers(PLAIN, 4 * BLOCK), buffers(PLAIN, 4 * BLOCK)
    store.read(store.match(namespace, tokens), into, blocks=[1, 3], shared=False)
    for block in (1, 3):
        assert_true_state(PLAIN, into, tokens, block * BLOCK, (block + 1) * BLOCK)
    for name, layers in into.items():
        for layer, clean in zip(layers, untouched[name], strict=True):
            for array, blank in zip(layer, clean, strict=True):
                assert np.array_equal(array[:, :, :BLOCK], blank[:, :, :BLOCK])
                assert np.array_equal(array[:, :, 32:48], blank[:, :, 32:48])


def test_a_read_only_store_reads_and_refuses_to_write(path: Path) -> None:
    tokens = random_tokens(17, 2 * BLOCK)
    with kvdb.open(path) as store:
        put_all(store, open_namespace(store), tokens)
    with kvdb.open(path, read_only=True) as store:
        namespace = store.namespaces()[0]
        assert check_prefix(store, namespace, tokens) == 2 * BLOCK
        with store.lease(namespace, tokens) as lease:
            assert lease.sequence is None
        with pytest.raises(StoreReadOnly):
            store.put(namespace, tokens, payloads(namespace, tokens))
        with pytest.raises(StoreReadOnly):
            store.evict(to_bytes=0)


def test_a_closed_store_says_so(path: Path) -> None:
    store = kvdb.open(path)
    namespace = open_namespace(store)
    store.close()
    store.close()
    with pytest.raises(StoreClosed):
        store.match(namespace, [1, 2, 3])
    with pytest.raises(StoreClosed):
        store.put(namespace, random_tokens(1, 4), [])


def test_clean_shutdown_loses_nothing_that_was_queued(path: Path) -> None:
    tokens = [random_tokens(seed, 3 * BLOCK) for seed in range(8)]
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        for chain in tokens:
            store.put(namespace, chain, payloads(namespace, chain))
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        assert all(check_prefix(store, namespace, chain) == 3 * BLOCK for chain in tokens)
        assert store.info().leftovers == 0
