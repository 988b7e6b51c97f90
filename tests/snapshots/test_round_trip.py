"""What is exported here and imported there is the same there, and back."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvdb
from kvdb import index, retention
from kvdb.encryption import Keys, Lock
from kvdb.errors import (
    IntegrityError,
    QueryError,
    SnapshotRejected,
    StoreMissing,
    UsageError,
)
from kvdb.match import Namespace
from kvdb.store import Store
from tests.snapshots.world import blocks, fill, pair, snapshot_of
from tests.support import (
    BLOCK,
    MIXED,
    PLAIN,
    check_prefix,
    open_namespace,
    part_bytes,
    payloads,
    put_all,
    random_tokens,
    shard_files,
)

# Questions whose answers are content: none asks for ids, times, shards or where a block came from.
QUESTIONS = (
    "SELECT lower(hex(hash)), depth, token_count, state, exact FROM blocks ORDER BY 1",
    "SELECT lower(hex(b.hash)), p.part, p.nbytes, p.raw_nbytes, p.codec, lower(hex(p.checksum)) "
    "FROM parts AS p JOIN blocks AS b ON b.id = p.block_id ORDER BY 1, 2",
    "SELECT lower(hex(b.hash)), lower(hex(f.hash)) FROM blocks AS b "
    "LEFT JOIN blocks AS f ON f.id = b.parent_id ORDER BY 1",
    "SELECT lower(hex(b.hash)), lower(hex(t.tokens)), lower(hex(t.extra)) FROM block_tokens AS t "
    "JOIN blocks AS b ON b.id = t.block_id ORDER BY 1",
    "SELECT lower(hex(fingerprint)), model, identity, layout, block_tokens, live_blocks, "
    "live_tokens, live_bytes FROM namespaces ORDER BY 1",
    "SELECT s.name, lower(hex(b.hash)) FROM sequences AS s JOIN blocks AS b ON b.id = s.tip_id "
    "WHERE s.name IS NOT NULL ORDER BY 1",
    "SELECT name, depth, hash, token_count, state FROM sequence_blocks ORDER BY 1, 2",
    "SELECT model, sum(live_bytes), sum(live_tokens) FROM capacity GROUP BY model ORDER BY 1",
    "SELECT depth, count(*), sum(nbytes) FROM block_usage GROUP BY depth ORDER BY 1",
    "SELECT hash, tokens_before, token_count, depth FROM prefix_tree ORDER BY 1",
)


def answers(store: Store) -> list[object]:
    return [store.sql(question, limit=10_000).rows for question in QUESTIONS]


def test_there_and_back(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b):
        fill(a)
        done = a.export_snapshot(tmp_path / "a.tar")
        came = b.import_snapshot(tmp_path / "a.tar")
        assert (came.stored, came.present, came.digest) == (done.blocks, 0, done.digest)
        assert answers(b) == answers(a)
        assert {row[0] for row in b.sql("SELECT DISTINCT origin FROM blocks").rows} == {"import"}
        (row,) = b.sql("SELECT direction, digest, name, blocks, new_blocks FROM snapshots").rows
        assert row == ("import", done.digest, "a.tar", done.blocks, done.blocks)
        for seed, layout in enumerate((PLAIN, MIXED)):
            assert check_prefix(b, open_namespace(b, layout), random_tokens(seed, 100)) == 100
        back = b.export_snapshot(tmp_path / "b.tar")
        assert back.digest == done.digest
        assert (tmp_path / "b.tar").read_bytes() == (tmp_path / "a.tar").read_bytes()
        again = a.import_snapshot(tmp_path / "b.tar")
        assert (again.new, again.present) == (0, done.blocks)
        for store in (a, b):
            assert store.verify(data=True).problems == []


def test_the_same_twice_is_free(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b):
        fill(a)
        data = snapshot_of(a)
        b.import_snapshot(io.BytesIO(data))
        before = (shard_files(b.path), answers(b), b.sql("SELECT * FROM snapshots").rows)
        written = b.sql("SELECT shards FROM write_totals").rows
        report = b.import_snapshot(io.BytesIO(data))
        assert (report.new, report.stored, report.nbytes) == (0, 0, 0)
        assert (shard_files(b.path), answers(b), b.sql("SELECT * FROM snapshots").rows) == before
        assert b.sql("SELECT shards FROM write_totals").rows == written


def test_through_a_pipe(tmp_path: Path) -> None:
    with kvdb.open(tmp_path / "a") as a:
        fill(a)
        there = answers(a)
    command = [sys.executable, "-m", "kvdb"]
    with subprocess.Popen(
        [*command, "export", "-", "--store", tmp_path / "a"], stdout=subprocess.PIPE
    ) as export:
        done = subprocess.run(
            [*command, "import", "-", "--store", tmp_path / "b"],
            stdin=export.stdout,
            capture_output=True,
            check=False,
            timeout=120,
        )
    assert (export.returncode, done.returncode) == (0, 0), done.stderr
    with kvdb.open(tmp_path / "b") as b:
        assert answers(b) == there


def test_a_name_that_is_taken_and_one_that_is_over(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b):
        namespace = fill(a)[0]
        tip = a.match(namespace, random_tokens(0, 100)).tip_hash
        a.sequence(namespace, tip, name="soon", ttl_seconds=0)
        own = open_namespace(b)
        put_all(b, own, random_tokens(7, 20))
        b.sequence(own, b.match(own, random_tokens(7, 20)).tip_hash, name="agent 0")
        report = b.import_snapshot(io.BytesIO(snapshot_of(a)))
        assert report.sequences == ["agent 1"]
        assert {name for name, _ in report.sequences_left} == {"agent 0", "soon"}


# -- choosing ------------------------------------------------------------------------------------


def chosen(tmp_path: Path, store: Store, **selection: object) -> set[str]:
    """Hashes of the blocks that an export of this selection brings to an empty store."""
    target = io.BytesIO()
    store.export_snapshot(target, **selection)  # type: ignore[arg-type]
    folder = tmp_path / f"chosen{len(list(tmp_path.iterdir()))}"
    with kvdb.open(folder) as other:
        other.import_snapshot(io.BytesIO(target.getvalue()))
        return blocks(other)


def chain(store: Store, namespace: Namespace, seed: int, count: int = 100) -> set[str]:
    return {h.hex() for h in store.match(namespace, random_tokens(seed, count)).hashes}


def test_choosing(tmp_path: Path) -> None:
    with kvdb.open(tmp_path / "a") as a:
        plain, mixed = fill(a)
        put_all(a, plain, random_tokens(5, 50))
        every = blocks(a)
        assert chosen(tmp_path, a) == every
        assert chosen(tmp_path, a, sequences=["agent 0"]) == chain(a, plain, 0)
        model = mixed.fingerprint.hex()[:12]
        assert chosen(tmp_path, a, model=model) == chain(a, mixed, 1)
        # Closed over ancestors: the tip brings its chain along.
        tip = a.match(plain, random_tokens(5, 50)).hashes[-1].hex()
        where = f"hash = '{tip}' -- a comment"
        assert chosen(tmp_path, a, where=where) == chain(a, plain, 5, 50)
        for wrong, error in (
            ({"where": "1) UNION SELECT id, 2 FROM blocks WHERE (1"}, QueryError),
            ({"where": "nonsense >"}, QueryError),
            ({"where": "1); DELETE FROM blocks; SELECT (1"}, QueryError),
            ({"sequences": ["nobody"]}, StoreMissing),
            ({"model": "nothing"}, StoreMissing),
            ({"since": "yesterday"}, UsageError),
            ({"codec": "nothing"}, UsageError),
        ):
            with pytest.raises(error):
                a.export_snapshot(io.BytesIO(), **wrong)  # type: ignore[arg-type]
        assert blocks(a) == every


def test_the_hottest_that_fit(tmp_path: Path) -> None:
    with kvdb.open(tmp_path / "a") as a:
        namespace = open_namespace(a)
        for seed in range(12):
            put_all(a, namespace, random_tokens(seed, 64))
        hot = a.match(namespace, random_tokens(3, 64))
        for _ in range(2):
            with a.database.write() as connection:
                tick = index.next_tick(connection)
                retention.touch(connection, [block.id for block in hot.blocks], tick)
        for most in (90_000, 100_000):
            target = io.BytesIO()
            report = a.export_snapshot(target, max_bytes=most)
            assert report.nbytes == len(target.getvalue()) <= most
            assert report.blocks >= 4
            kept = chosen(tmp_path, a, max_bytes=most)
            assert kept >= {h.hex() for h in hot.hashes}
            assert kept < blocks(a)


def test_since(tmp_path: Path) -> None:
    """An increment holds what is new; it stands on what the importing store must have."""
    with pair(tmp_path) as (a, b):
        namespace = open_namespace(a)
        tokens = random_tokens(1, 96)
        put_all(a, namespace, tokens[:48])
        base = a.export_snapshot(tmp_path / "base.tar")
        put_all(a, namespace, tokens)
        for since in (str(tmp_path / "base.tar"), base.digest[:16]):
            target = io.BytesIO()
            assert a.export_snapshot(target, since=since).blocks == 3
            increment = target.getvalue()
        alone = b.import_snapshot(io.BytesIO(increment))
        assert (alone.stored, alone.incompatible["parent_missing"]) == (0, 3)
        assert blocks(b) == set()
        b.import_snapshot(tmp_path / "base.tar")
        assert b.import_snapshot(io.BytesIO(increment)).stored == 3
        assert blocks(b) == blocks(a)
        assert a.export_snapshot(io.BytesIO(), since="1d").blocks == 6
        assert a.export_snapshot(io.BytesIO(), since="2999-01-01").blocks == 0


# -- forms ---------------------------------------------------------------------------------------


def test_encoded_on_the_way(tmp_path: Path) -> None:
    """Other bytes, the same state; with one codec the same bytes, however the store encodes."""
    tokens = np.zeros(64, np.uint32)
    with kvdb.open(tmp_path / "a") as a, kvdb.open(tmp_path / "b", codec="lz4") as b:
        for store in (a, b):
            namespace = open_namespace(store)
            zeros = payloads(namespace, tokens)
            for payload in zeros:
                for part in payload.parts.values():
                    part[:] = 0
            store.put(namespace, tokens, zeros).wait(30)
        exported = []
        for store in (a, b):
            target = io.BytesIO()
            store.export_snapshot(target, codec="zstd")
            exported.append(target.getvalue())
        assert exported[0] == exported[1]
        assert len(exported[0]) < len(snapshot_of(a))
        with kvdb.open(tmp_path / "c") as c:
            c.import_snapshot(io.BytesIO(exported[0]))
            assert c.sql("SELECT DISTINCT codec FROM parts").rows == [("zstd",)]
            match = c.match(open_namespace(c), tokens)
            assert match.live_prefix_tokens == 64
            raw = c.read_part(match.blocks[0].parts["kv:0"])
            assert raw is not None
            assert not raw.any()
            assert c.verify(data=True).problems == []


@pytest.mark.parametrize("how", ["recipient", "passphrase"])
def test_encrypted(tmp_path: Path, how: str) -> None:
    import pyrage

    identity = pyrage.x25519.Identity.generate()
    stranger = pyrage.x25519.Identity.generate()
    if how == "recipient":
        lock, keys, wrong = Lock([str(identity.to_public())]), Keys([identity]), Keys([stranger])
    else:
        lock, keys, wrong = Lock((), "open"), Keys((), "open"), Keys((), "no")
    with pair(tmp_path) as (a, b):
        fill(a)
        a.export_snapshot(tmp_path / "a.age", lock=lock)
        data = (tmp_path / "a.age").read_bytes()
        assert b"kvdb snapshot" not in data
        damaged = ((data[:-1], keys), (data + b"x", keys)) if how == "recipient" else ()
        for bad, given in ((data, wrong), (data, None), *damaged):
            with pytest.raises(SnapshotRejected) as refused:
                b.import_snapshot(io.BytesIO(bad), keys=given)
            assert str(refused.value).count(".") == 1
        assert blocks(b) == set()
        b.import_snapshot(tmp_path / "a.age", keys=keys)
        assert answers(b) == answers(a)


def test_without_tokens(tmp_path: Path) -> None:
    """Its state is found by whoever has the prompt, and nobody can read the prompt from it."""
    with pair(tmp_path) as (a, b):
        plain = fill(a)[0]
        tokens = random_tokens(0, 100)
        data = snapshot_of(a, tokens=False)
        assert tokens[:16].astype("<u4").tobytes() not in data
        with pytest.raises(SnapshotRejected):
            b.import_snapshot(io.BytesIO(data))
        assert b.import_snapshot(io.BytesIO(data), trust=True).stored == len(blocks(a))
        namespace = open_namespace(b)
        assert check_prefix(b, namespace, tokens) == 100
        assert check_prefix(b, namespace, random_tokens(9, 100)) == 0
        # It grows, is compacted, verified and rebuilt as anything else.
        longer = np.concatenate([tokens[:96], random_tokens(8, 64)])
        put_all(b, namespace, longer)
        with pytest.raises(IntegrityError):
            b.find_sequence("agent 0").tokens()
        for (shard,) in b.sql("SELECT id FROM shards").rows:
            assert b.rewrite_shard(shard)
        assert b.verify(data=True).problems == []
        assert check_prefix(b, namespace, longer) == len(longer)
        assert snapshot_of(b, tokens=False, sequences=["agent 1"]) == snapshot_of(
            a, tokens=False, sequences=["agent 1"]
        )
        del plain
    kvdb.rebuild(tmp_path / "b")
    with kvdb.open(tmp_path / "b") as b:
        assert check_prefix(b, open_namespace(b), tokens) == 100
        assert b.verify(data=True).problems == []


# -- identity ------------------------------------------------------------------------------------


def test_identity_is_content(tmp_path: Path) -> None:
    """A renamed model matches and keeps its name; a different one does not."""
    with pair(tmp_path) as (a, b):
        namespace = fill(a)[0]
        identity = kvdb.ModelIdentity("w", "c")
        other = b.namespace(identity, PLAIN, model="renamed", block_tokens=BLOCK)
        different = b.namespace(
            kvdb.ModelIdentity("other", "c"), PLAIN, model="w", block_tokens=BLOCK
        )
        report = b.import_snapshot(io.BytesIO(snapshot_of(a)), dry_run=True)
        known, new = sorted(report.namespaces, key=lambda note: not note.known)
        assert (known.known, known.fingerprint) == (True, namespace.fingerprint.hex())
        assert (new.known, bool(new.differs)) == (False, True)
        assert blocks(b) == set()
        b.import_snapshot(io.BytesIO(snapshot_of(a)))
        assert check_prefix(b, other, random_tokens(0, 100)) == 100
        assert check_prefix(b, different, random_tokens(0, 100)) == 0
        assert b.sql("SELECT model FROM namespaces WHERE id = ?", [other.id]).rows == [("renamed",)]


def test_exact_blocks_stay_exact(tmp_path: Path) -> None:
    """An exact twin replaces an inexact block, if its build was compared with ours; and only a
    build of the same digest reuses it."""
    tokens = random_tokens(1, 48)
    with pair(tmp_path) as (a, b):
        for store, exact in ((a, True), (b, False)):
            namespace = open_namespace(store)
            build = store.build(namespace, "digest of A" if exact else "digest of B", {})
            store.put(
                namespace, tokens, payloads(namespace, tokens), exact=exact, build_id=build.id
            ).wait(30)
        unknown = b.import_snapshot(io.BytesIO(snapshot_of(a)))
        assert (unknown.new, unknown.present) == (0, 3)
        b.set_verdict(b.build(open_namespace(b), "digest of A", {}), True, 0.0)
        report = b.import_snapshot(io.BytesIO(snapshot_of(a)))
        assert (report.new, report.stored) == (3, 3)
        builds = (
            "SELECT DISTINCT b.exact, u.digest FROM blocks AS b "
            "JOIN builds AS u ON u.id = b.build_id"
        )
        assert b.sql(builds).rows == [(1, "digest of A")]
        back = a.import_snapshot(io.BytesIO(snapshot_of(b)))
        assert back.present == 3
        assert b.verify(data=True).problems == []


def test_optional_parts_come_along_later(tmp_path: Path) -> None:
    """A block that is here gains the logits and states that the snapshot has of it."""
    tokens = random_tokens(1, 40)
    with pair(tmp_path) as (a, b):
        for store in (a, b):
            namespace = open_namespace(store, MIXED)
            bare = payloads(namespace, tokens, optional=store is a)
            store.put(namespace, tokens, bare).wait(30)
        report = b.import_snapshot(io.BytesIO(snapshot_of(a)))
        assert (report.new, report.present) == (1, 2)
        match = b.match(open_namespace(b, MIXED), tokens)
        assert set(match.blocks[-1].parts) == set(MIXED.by_name)
        raw = b.read_part(match.blocks[-1].parts["logits"])
        assert raw is not None
        assert raw.tobytes() == part_bytes(MIXED.by_name["logits"], tokens, 32, 40).tobytes()


def test_no_path_of_a_model_leaves_the_machine(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b):
        model = str(tmp_path / "models" / "llama")
        space = a.namespace(kvdb.ModelIdentity("w", "c"), PLAIN, model=model, block_tokens=BLOCK)
        put_all(a, space, random_tokens(1, 40))
        target = io.BytesIO()
        a.export_snapshot(target)
        assert str(tmp_path).encode() not in target.getvalue()
        b.import_snapshot(io.BytesIO(target.getvalue()))
        assert [each.model for each in b.namespaces()] == ["llama"]
