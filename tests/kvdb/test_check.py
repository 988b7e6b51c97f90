"""verify finds what is wrong, repair mends it once, rebuild gives the same hits back."""

from __future__ import annotations

import sqlite3 as independent  # noqa: TID251 - another library looks at a closed file
from pathlib import Path

import pytest

import kvdb
from kvdb.answers import Answer
from kvdb.check.rebuild import rebuild_store
from kvdb.check.verify import VerifyReport
from kvdb.errors import IntegrityError, NotAStore, StoreLocked, StoreMissing
from kvdb.history import RequestRecord
from kvdb.identity import as_tokens
from tests.support import (
    BLOCK,
    MIXED,
    PLAIN,
    check_prefix,
    open_namespace,
    put_all,
    random_tokens,
    shard_files,
)

PROMPTS = [random_tokens(seed, count) for seed, count in ((1, 70), (2, 16), (3, 5), (4, 33))]


def fill(path: Path) -> None:
    with kvdb.open(path) as store:
        for layout in (PLAIN, MIXED):
            namespace = open_namespace(store, layout)
            for tokens in PROMPTS:
                put_all(store, namespace, tokens)


def hits(path: Path) -> list[tuple[int, bool]]:
    found = []
    with kvdb.open(path) as store:
        for layout in (PLAIN, MIXED):
            namespace = open_namespace(store, layout)
            for tokens in PROMPTS:
                count = check_prefix(store, namespace, tokens)
                found.append((count, store.match(namespace, tokens).logits is not None))
        assert store.verify(data=True).problems == []
    return found


@pytest.mark.parametrize("harm", ["deleted", "garbage", "none"])
def test_rebuild_after_losing_the_index_gives_the_same_hits(path: Path, harm: str) -> None:
    fill(path)
    before = hits(path)
    assert all(count == len(tokens) for (count, _), tokens in zip(before, PROMPTS * 2, strict=True))
    index = path / "index.sqlite"
    if harm == "deleted":
        index.unlink()
    elif harm == "garbage":
        index.write_bytes(b"SQLite format 3\0" + bytes(5000))
    if harm != "none":
        with pytest.raises((IntegrityError, NotAStore)):
            kvdb.open(path)
    report = rebuild_store(path)
    assert report.skipped == []
    assert (report.set_aside is None) == (harm == "deleted")
    assert hits(path) == before
    again = rebuild_store(path)
    assert (again.blocks, again.parts) == (report.blocks, report.parts)
    assert hits(path) == before


def test_rebuild_keeps_names_history_and_recency_of_a_readable_index(path: Path) -> None:
    fill(path)
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        match = store.match(namespace, PROMPTS[0])
        store.sequence(namespace, match.tip_hash, name="agent")
        touched = tuple(block.id for block in match.blocks)
        for _ in range(3):
            store.record(
                RequestRecord(
                    1,
                    namespace.id,
                    70,
                    70,
                    0,
                    0,
                    4,
                    "full",
                    deepest_block_id=touched[-1],
                    touched=touched,
                )
            )
            store.flush()
        query = "SELECT hash, hits, queue FROM blocks ORDER BY hash"
        before = store.sql(query).rows
    report = rebuild_store(path)
    assert report.sequences == 1
    with kvdb.open(path) as store:
        assert store.sql(query).rows == before
        assert store.sql("SELECT count(*) FROM requests WHERE skip = 'full'").rows == [(3,)]
        assert store.sql(
            "SELECT lower(hex(b.hash)) FROM requests AS r JOIN blocks AS b "
            "ON b.id = r.deepest_block_id LIMIT 1"
        ).rows == [((match.tip_hash or b"").hex(),)]
        assert store.verify().problems == []


def test_names_and_history_survive_the_loss_of_the_index_through_its_backup(path: Path) -> None:
    fill(path)
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        tip = store.match(namespace, PROMPTS[0]).tip_hash
        store.sequence(namespace, tip, name="agent")
        answer = Answer(bytes(32), as_tokens([1, 2, 3]))
        store.record(RequestRecord(1, namespace.id, 70, 70, 0, 0, 4, "full"), answer=answer)
        (path / "index.backup").unlink()
    (path / "index.sqlite").unlink()
    report = rebuild_store(path)
    assert report.sequences == 1
    (lost,) = report.lost
    assert "newer than the backup" in lost
    with kvdb.open(path) as store:
        assert store.sql("SELECT name FROM sequences").rows == [("agent",)]
        assert store.sql("SELECT count(*) FROM requests").rows == [(1,)]
        assert store.answers([answer.key])[answer.key][0].tolist() == [1, 2, 3]
        assert store.verify().problems == []


def test_rebuild_says_what_is_lost_with_index_and_backup(path: Path) -> None:
    fill(path)
    (path / "index.sqlite").unlink()
    (path / "index.backup").unlink()
    report = rebuild_store(path)
    assert any("history" in line for line in report.lost)


def test_rebuild_skips_damaged_shards_and_keeps_what_stands_on_whole_ones(path: Path) -> None:
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        tokens = random_tokens(9, 4 * BLOCK)
        for end in range(BLOCK, 5 * BLOCK, BLOCK):
            put_all(store, namespace, tokens[:end])
        third = store.match(namespace, tokens).blocks[2]
        uuid = store.locate([third.id])[third.id, "kv:0"].shard
    file = next(f for f in shard_files(path) if f.stem == uuid)
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[:100])
    (path / "index.sqlite").unlink()
    report = rebuild_store(path)
    assert len(report.skipped) == 1
    assert (report.blocks, len([line for line in report.lost if "parent" in line])) == (2, 1)
    with kvdb.open(path) as store:
        assert check_prefix(store, open_namespace(store), tokens) == 2 * BLOCK


def test_rebuild_needs_the_store_for_itself(path: Path) -> None:
    with kvdb.open(path), pytest.raises(StoreLocked):
        rebuild_store(path)
    with pytest.raises(StoreMissing):
        rebuild_store(path.parent / "nothing")


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("UPDATE blocks SET refs = refs + 1 WHERE depth = 0", "refs"),
        ("UPDATE counters SET value = value + 5 WHERE name = 'shard_bytes'", "totals"),
        ("UPDATE namespaces SET live_bytes = 0", "totals"),
        ("UPDATE shards SET live_parts = live_parts + 1", "totals"),
        ("UPDATE block_tokens SET tokens = zeroblob(length(tokens))", "block"),
        ("DELETE FROM block_tokens WHERE block_id = 1", "block"),
        ("UPDATE blocks SET hash = zeroblob(32) WHERE id = 2", "block"),
        ("DELETE FROM parts WHERE part = 'kv:0' AND block_id = 2", "block"),
        ("UPDATE parts SET offset = offset + 8 WHERE block_id = 1", "damaged"),
        ("UPDATE parts SET checksum = zeroblob(16) WHERE block_id = 1", "damaged"),
        ("UPDATE parts SET offset = 99999999 WHERE block_id = 1", "damaged"),
    ],
)
def test_verify_finds_a_lying_index_and_a_second_repair_changes_nothing(
    path: Path, sql: str, kind: str
) -> None:
    fill(path)
    connection = independent.connect(path / "index.sqlite")
    connection.execute("PRAGMA recursive_triggers = OFF")
    connection.execute(sql)
    connection.commit()
    connection.close()
    with kvdb.open(path) as store:
        found = store.verify(data=True)
        assert kind in {problem.kind for problem in found.problems}
        assert not found.ok
        assert store.verify(data=True, repair=True).ok
        for _ in range(2):
            again = store.verify(data=True, repair=True)
            assert again.problems == []
        namespace = open_namespace(store)
        for tokens in PROMPTS:
            check_prefix(store, namespace, tokens)


def test_verify_finds_every_kind_of_payload_damage(path: Path) -> None:
    fill(path)
    files = shard_files(path)
    for file in files:
        file.chmod(0o600)
    files[0].unlink()
    files[1].write_bytes(b"")
    files[2].write_bytes(files[2].read_bytes() + b"x")
    data = bytearray(files[3].read_bytes())
    data[-1] ^= 1
    files[3].write_bytes(data)
    with kvdb.open(path) as store:
        structure = {problem.where for problem in store.verify().problems}
        full = {problem.where for problem in store.verify(data=True).problems}
        assert structure
        assert full
        assert store.verify(data=True, repair=True).ok
        assert store.verify(data=True).problems == []


def test_files_without_a_row_are_found_after_a_grace_period(path: Path) -> None:
    import os

    fill(path)
    stray = path / "shards" / "ab" / ("ab" * 16 + ".safetensors")
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"left by a crash before its row")
    with kvdb.open(path) as store:
        assert store.verify().problems == []
        os.utime(stray, (1, 1))
        assert [problem.kind for problem in store.verify().problems] == ["orphan"]
        assert stray.exists()
        assert store.verify(repair=True).swept_files == 1
        assert not stray.exists()


def test_an_interrupted_verification_goes_on_where_it_stopped(path: Path) -> None:
    fill(path)
    with kvdb.open(path) as store:
        report = VerifyReport()

        def stop(done: int, total: int) -> None:
            if done == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.verify(data=True, report=report, progress=stop)
        assert report.checked_shards == 3
        rest = store.verify(data=True, start=report.next_shard + 1)
        assert report.checked_shards + rest.checked_shards == len(shard_files(path))
