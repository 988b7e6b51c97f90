"""What a hostile user, a failing machine, or another program may do to a store."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import kvdb
from kvdb import driver
from kvdb.check import rebuild
from kvdb.durable import FileSystem
from kvdb.errors import IntegrityError, KvdbError, UsageError
from kvdb.history import RequestRecord
from kvdb.shards import description_checksum
from kvdb.store import Store
from kvdb.writer import Payload
from tests.support import (
    BLOCK,
    PLAIN,
    buffers,
    check_prefix,
    open_namespace,
    payloads,
    put_all,
    random_tokens,
    shard_files,
)

MIB = 1 << 20


def child(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_closing_under_running_matches_is_an_error_to_them_not_a_crash(path: Path) -> None:
    code = """
import sys, threading, kvdb
from tests.support import *
tokens = random_tokens(1, 200 * BLOCK)
with kvdb.open(sys.argv[1]) as s:
    put_all(s, open_namespace(s), tokens)
for _ in range(15):
    s = kvdb.open(sys.argv[1]); n = s.namespaces()[0]
    def work():
        try:
            while True: s.match(n, tokens)
        except kvdb.errors.StoreClosed: pass
    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    s.close()
    [t.join() for t in threads]
print("alive")
"""
    process = child(code.replace("kvdb.errors", "__import__('kvdb.errors').errors"), path)
    assert process.communicate(timeout=120)[0] == "alive\n"


def test_a_match_of_an_evicted_block_never_reads_its_successor(store: Store) -> None:
    namespace = open_namespace(store)
    first, second = random_tokens(1, BLOCK), random_tokens(2, BLOCK)
    put_all(store, namespace, first)
    match = store.match(namespace, first)
    store.evict(to_bytes=0)
    with store.database.write() as connection:
        connection.execute("DELETE FROM blocks")  # what trimming history does in time
    put_all(store, namespace, second)
    assert store.read(match, buffers(PLAIN, BLOCK)).bad == (0,)
    assert match.logits is not None
    assert store.read_part(match.logits) is None


def test_dropping_a_sequence_twice_leaves_others_alone(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(1, BLOCK)
    put_all(store, namespace, tokens)
    sequence = store.sequence(namespace, store.match(namespace, tokens).tip_hash)
    sequence.drop()
    with store.lease(namespace, tokens):
        sequence.drop()
        assert store.evict(to_bytes=0).blocks == 0


def test_running_out_of_descriptors_is_a_miss_and_destroys_nothing(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(1, 4 * BLOCK)
    for end in range(BLOCK, 5 * BLOCK, BLOCK):
        put_all(store, namespace, tokens[:end])
    match = store.match(namespace, tokens)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # the number that the next file would get
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        result = store.read(match, buffers(PLAIN, 4 * BLOCK))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert result.bad
    assert store.sql("SELECT count(*) FROM evictions").rows == [(0,)]
    assert check_prefix(store, namespace, tokens) == 4 * BLOCK


def test_a_row_that_names_other_bytes_fails_also_after_they_were_verified(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(1, 2 * BLOCK)
    put_all(store, namespace, tokens)
    assert check_prefix(store, namespace, tokens) == 2 * BLOCK
    with store.database.write() as connection:
        connection.execute(
            "UPDATE parts SET offset = (SELECT offset FROM parts WHERE block_id = 1 AND "
            "part = 'kv:0') WHERE block_id = 2 AND part = 'kv:0'"
        )
    assert check_prefix(store, namespace, tokens) == BLOCK


def test_an_index_cut_to_nothing_is_not_taken_for_a_new_store(path: Path) -> None:
    tokens = random_tokens(1, BLOCK)
    with kvdb.open(path) as store:
        put_all(store, open_namespace(store), tokens)
    (path / "index.sqlite").write_bytes(b"")
    with pytest.raises(IntegrityError, match="kvdb rebuild"):
        kvdb.open(path)
    kvdb.rebuild(path)
    with kvdb.open(path) as store:
        assert check_prefix(store, open_namespace(store), tokens) == BLOCK


def test_one_bad_record_or_put_is_refused_and_costs_nobody_else(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(1, 2 * BLOCK)
    for counts in ((5, 0, 0, 1), (-1, 0, 1, 0), (1 << 63, 0, 0, 0)):
        with pytest.raises(UsageError):
            RequestRecord(1, namespace.id, *counts, 0, "none")
    with pytest.raises(UsageError):
        store.put(namespace, tokens, payloads(namespace, tokens), origin="guess")
    with pytest.raises(UsageError):
        store.put(namespace, tokens, payloads(namespace, tokens), build_id=99)
    strided = {"kv:0": np.zeros(2 * PLAIN.by_name["kv:0"].nbytes(BLOCK), np.uint8)[::2]}
    with pytest.raises(UsageError, match="contiguous"):
        store.put(namespace, tokens[:BLOCK], [Payload(0, strided)])
    store.record(RequestRecord(1, 12345, 1, 0, 0, 1, 0, "none", client="\ud800"))
    store.record(RequestRecord(1, namespace.id, 1, 0, 0, 1, 0, "none", client="\ud800"))
    put_all(store, namespace, tokens)
    store.flush()
    assert store.sql("SELECT client FROM requests").rows == [("?",)]


def test_another_programs_write_lock_is_said_and_passes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "BUSY_TIMEOUT_SECONDS", 0.05)
    tokens = random_tokens(1, BLOCK)
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        other = driver.connect(path / "index.sqlite")
        other.execute("BEGIN IMMEDIATE")
        result = store.put(namespace, tokens, payloads(namespace, tokens)).wait(30)
        assert (result.dropped, result.reason) == (1, "StoreLocked")
        assert store.lease(namespace, tokens).sequence is None
        other.execute("ROLLBACK")
        other.close()
        put_all(store, namespace, tokens)


def test_a_reader_from_outside_cannot_make_the_log_outgrow_the_limit(path: Path) -> None:
    with kvdb.open(path, max_bytes=16 * MIB, min_free_bytes=0) as store:
        namespace = open_namespace(store)
        put_all(store, namespace, random_tokens(1, BLOCK))
        reader = driver.connect(path / "index.sqlite", read_only=True)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM blocks").fetchall()
        for _ in range(4000):
            store.record(RequestRecord(1, namespace.id, 1, 0, 0, 1, 0, "none"))
            store.flush()
        for seed in range(100, 400):
            tokens = random_tokens(seed, BLOCK)
            store.put(namespace, tokens, payloads(namespace, tokens)).wait(30)
        assert store.used_bytes() <= 16 * MIB
        reader.execute("ROLLBACK")
        reader.close()
        put_all(store, namespace, random_tokens(2, BLOCK))


def test_what_a_killed_process_held_is_released_by_a_survivor(path: Path) -> None:
    code = (
        "import sys, time, kvdb;from tests.support import *;"
        "s = kvdb.open(sys.argv[1]); n = open_namespace(s); t = random_tokens(1, 40);"
        "put_all(s, n, t); lease = s.lease(n, t); print('held', flush=True); sys.stdin.read()"
    )
    with kvdb.open(path) as store:
        process = child(code, path)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert store.evict(to_bytes=0).blocks == 0
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert store.evict(to_bytes=0).blocks == 3
        assert store.info().processes == 1


@pytest.mark.parametrize("crash_at", [1, 2, 3])
def test_a_crash_while_the_new_index_takes_its_place_loses_nothing(
    path: Path, crash_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException):
        pass

    class Crashing(FileSystem):
        calls = 0

        def _count(self) -> None:
            self.calls += 1
            if self.calls == crash_at:
                raise Crash

        def rename(self, source: Path, target: Path) -> None:
            self._count()
            super().rename(source, target)

        def unlink(self, path: Path) -> None:
            self._count()
            super().unlink(path)

        def sync_directory(self, path: Path) -> None:
            self._count()
            super().sync_directory(path)

    tokens = random_tokens(1, 2 * BLOCK)
    store = kvdb.open(path)
    namespace = open_namespace(store)
    put_all(store, namespace, tokens)
    store.sequence(namespace, store.match(namespace, tokens).tip_hash, name="agent")
    # Die without a checkpoint: the newest commits are in the WAL only.
    copy = path.parent / "copy"
    subprocess.run(["cp", "-r", path, copy], check=True)  # noqa: S607
    store.close()
    monkeypatch.setattr(rebuild, "FileSystem", Crashing)
    with contextlib.suppress(Crash):
        rebuild.rebuild_store(copy)
    with kvdb.open(copy) as again:
        assert again.sql("SELECT name FROM sequences").rows == [("agent",)]
        assert check_prefix(again, open_namespace(again), tokens) == 2 * BLOCK
        assert again.verify(data=True).problems == []


def test_a_forked_child_is_told_that_the_store_is_not_its_own(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(1, BLOCK)
    made = payloads(namespace, tokens)
    pid = os.fork()
    if pid == 0:
        refused = 0
        for call in (
            lambda: store.put(namespace, tokens, made),
            lambda: store.match(namespace, tokens),
            lambda: store.lease(namespace, tokens),
        ):
            try:
                call()
            except KvdbError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    put_all(store, namespace, tokens)


def test_finished_threads_leave_no_descriptors(store: Store) -> None:
    namespace = open_namespace(store)
    tokens = random_tokens(1, BLOCK)
    put_all(store, namespace, tokens)
    for _ in range(100):
        thread = threading.Thread(target=store.match, args=(namespace, tokens))
        thread.start()
        thread.join()
    assert len(store.database._idle) <= driver.IDLE_READERS


@pytest.mark.parametrize(
    "field", ["origin", "depth", "build", "exact", "tokens", "parent", "hash", "extra"]
)
@pytest.mark.parametrize("value", [None, -1, 1 << 70, "x", [], "\ud800"])
def test_a_shard_that_lies_is_skipped_and_the_rest_is_rebuilt(
    path: Path, field: str, value: object
) -> None:

    good, bad = random_tokens(1, BLOCK), random_tokens(2, BLOCK)
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        put_all(store, namespace, good)
        put_all(store, namespace, bad)
        block = store.match(namespace, bad).blocks[0]
        uuid = store.locate([block.id])[block.id, "kv:0"].shard
    file = next(f for f in shard_files(path) if f.stem == uuid)
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    document = json.loads(header["__metadata__"]["kvdb"])
    document["blocks"][0][field] = value
    document["checksum"] = description_checksum(document, header)
    header["__metadata__"]["kvdb"] = json.dumps(document)
    text = json.dumps(header).encode()
    file.chmod(0o600)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    (path / "index.sqlite").unlink()
    kvdb.rebuild(path)
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        assert check_prefix(store, namespace, good) == BLOCK
        check_prefix(store, namespace, bad)
        assert store.verify().ok
