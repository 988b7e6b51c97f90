"""Killed, stopped and damaged half-way: what is left is valid, and the rest goes on."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import kvdb
from kvdb.snapshot import export
from kvdb.snapshot.export import PARTIAL
from kvdb.snapshot.selection import Selection, make_plan
from kvdb.store import Store
from tests.snapshots.world import blocks, fill, pair, snapshot_of
from tests.support import BLOCK, check_prefix, open_namespace, put_all, random_tokens, shard_files

# Imports argv[2] into argv[1] in many small runs, and dies where argv[3] says.
IMPORTER = """
import os, signal, sys
import kvdb
from kvdb.snapshot import staging

staging.RUN_BYTES = 4096
store_path, snapshot, when = sys.argv[1:]
settled = 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)

settle = staging.Staging._settle
def counted(self, staged):
    global settled
    settled += 1
    if when == "after" and settled == 3:
        die()
    content = settle(self, staged)
    if when == "named" and settled == 3:
        die()
    return content
staging.Staging._settle = counted

with kvdb.open(store_path) as store:
    size = os.path.getsize(snapshot)
    def progress(done, total):
        if when == "before" and done > size * 0.8:
            die()
    store.import_snapshot(snapshot, progress=progress)
"""


@pytest.mark.parametrize("when", ["before", "after", "named"])
def test_killed(tmp_path: Path, when: str) -> None:
    """Before verification nothing is there but what the next opener sweeps; after it, what became
    visible is a valid smaller cache, and the import goes on."""
    with kvdb.open(tmp_path / "a") as a:
        fill(a)
        a.export_snapshot(tmp_path / "a.tar")
        every = blocks(a)
    command = [sys.executable, "-c", IMPORTER, tmp_path / "b", tmp_path / "a.tar", when]
    assert subprocess.run(command, check=False, timeout=120).returncode == -9
    if when == "before":
        assert list((tmp_path / "b" / "tmp").iterdir())
        assert shard_files(tmp_path / "b") == []
    with kvdb.open(tmp_path / "b") as b:
        assert list((tmp_path / "b" / "tmp").iterdir()) == []
        left = blocks(b)
        assert (left == set()) if when == "before" else (set() < left < every)
        assert b.verify(data=True).problems == []
        report = b.import_snapshot(tmp_path / "a.tar")
        assert (report.present, report.stored) == (len(left), len(every - left))
        assert blocks(b) == every
        assert snapshot_of(b) == (tmp_path / "a.tar").read_bytes()
        assert b.verify(data=True).problems == []


def stop_at(number: int):
    def progress(done: int, total: int) -> None:
        if done == number:
            raise KeyboardInterrupt

    return progress


def test_an_export_goes_on(tmp_path: Path, store: Store) -> None:
    """To the bytes of one that was never stopped; also where the part written is damaged."""
    fill(store)
    whole = snapshot_of(store)
    target = tmp_path / "s.tar"
    partial = target.with_name(target.name + PARTIAL)
    with pytest.raises(KeyboardInterrupt):
        store.export_snapshot(target, progress=stop_at(5))
    assert partial.exists()
    assert not target.exists()
    assert store.sql("SELECT count(*) FROM sequences WHERE name IS NULL").rows == [(0,)]
    report = store.export_snapshot(target)
    assert (report.resumed, report.nbytes) == (5, len(whole))
    assert target.read_bytes() == whole
    assert not partial.exists()
    for damage in (whole[: len(whole) // 2 + 7], whole[:6000] + b"x" + whole[6001:], b"other", b""):
        target.unlink()
        partial.write_bytes(damage)
        assert store.export_snapshot(target).nbytes == len(whole)
        assert target.read_bytes() == whole
    # Of another selection nothing is kept.
    target.unlink()
    partial.write_bytes(whole)
    store.export_snapshot(target, sequences=["agent 1"])
    assert target.read_bytes() == snapshot_of(store, sequences=["agent 1"])


def test_a_block_that_went_is_left_out_with_its_descendants(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b):
        namespace = open_namespace(a)
        tokens = random_tokens(1, 6 * BLOCK)
        for end in range(BLOCK, len(tokens) + 1, BLOCK):  # a shard for each block
            put_all(a, namespace, tokens[:end])
        match = a.match(namespace, tokens)
        place = a.locate([match.blocks[2].id])[match.blocks[2].id, "kv:0"]
        (file,) = (path for path in shard_files(a.path) if path.stem == place.shard)
        file.unlink()
        target = io.BytesIO()
        report = a.export_snapshot(target)
        assert (report.blocks, report.skipped) == (2, 4)
        b.import_snapshot(io.BytesIO(target.getvalue()))
        assert check_prefix(b, open_namespace(b), tokens) == 2 * BLOCK


def test_a_block_that_went_leaves_the_one_before_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is hashed and written while the next is read, and the one after that if that is gone."""
    namespace = open_namespace(store)
    for seed in (1, 2):
        put_all(store, namespace, random_tokens(seed, 3 * BLOCK))
    read, numbers = export.read_member, count()

    def some(*arguments: Any) -> Any:
        found = read(*arguments)
        return None if next(numbers) == 2 else found  # the end of the first chain

    monkeypatch.setattr(export, "read_member", some)
    plan = make_plan(store, Selection(), tokens=True, recoded=None)
    with contextlib.closing(export._Export(store, plan, None, True, None)) as run:
        made = run.blocks()
        buffers = [next(made) for _ in range(2)][-1]
        before = b"".join(buffers)
        next(made)
        assert run.report.skipped == 1
        assert b"".join(buffers) == before
