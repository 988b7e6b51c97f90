"""Disks that are full, too small, read-only, or gone: typed answers, and service goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvdb
from kvdb.errors import KvdbError, OutOfSpace, StoreUnavailable
from tests.crash.crowd import wide
from tests.crash.tracing import needs_strace, traced
from tests.crash.worker import everything, fill, outcome, readable
from tests.crash.zygote import Zygote
from tests.support import BLOCK, random_tokens

MIB = 1 << 20
WRITES = "pwrite64,writev,rename,unlink,mkdir,chmod,ftruncate,fallocate,fsync,fdatasync"


@contextmanager
def small_volume(at: Path, size: int) -> Iterator[Path]:
    """A tmpfs of ``size`` bytes; skips, loudly, where mounting is not allowed."""
    at.mkdir(parents=True, exist_ok=True)
    if not _mounted("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)):
        pytest.skip("NOT PROVEN: this account may not mount, so no disk is filled")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True, timeout=30)  # noqa: S607


def _mounted(*arguments: str) -> bool:
    if shutil.which("mount") is None:
        return False
    done = subprocess.run(
        ["mount", *arguments],  # noqa: S607
        capture_output=True,
        timeout=30,
    )
    return done.returncode == 0


def fill_the_rest(volume: Path) -> Path:
    """A file of somebody else's that leaves no byte free."""
    file = volume / "somebody's"
    with file.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(bytes(4096))
    return file


def test_disk_full_by_our_own_doing_stops_or_evicts_and_recovers(tmp_path: Path) -> None:
    with small_volume(tmp_path / "volume", 20 * MIB) as volume:
        for round_ in range(3):
            # The limit is beyond the volume, so that the disk is what says no.
            with kvdb.open(volume / "store", max_bytes=64 * MIB, min_free_bytes=0) as store:
                stored, reasons = fill(store, 1000 * round_, 90)
                assert reasons <= {"disk_full", "OutOfSpace", "io_error", "StoreUnavailable"}
                assert reasons, "the volume was not filled"
                assert readable(store, stored) == len(stored)
                assert store.verify(data=True).problems == []
                assert store.evict(to_bytes=0).blocks > 0
                again, reasons = fill(store, 1000 * round_ + 500, 3)
                assert (len(again), reasons) == (3, set())
            with kvdb.open(volume / "store") as store:
                assert readable(store, again) == 3
                assert store.verify(data=True).problems == []
                assert list((volume / "store" / "tmp").iterdir()) == []


def test_disk_full_by_somebody_else_lets_eviction_work_and_recovers(tmp_path: Path) -> None:
    with small_volume(tmp_path / "volume", 20 * MIB) as volume:
        with kvdb.open(volume / "store", max_bytes=64 * MIB, min_free_bytes=0) as store:
            stored, _ = fill(store, 0, 20)
            for first in (100, 200, 300):
                file = fill_the_rest(volume)
                none, reasons = fill(store, first, 3)
                assert (none, bool(reasons)) == ([], True)
                assert readable(store, stored) == len(stored)
                # Room of its own: the ballast's. What eviction gives back is room for puts.
                report = store.evict(to_bytes=store.used_bytes() - MIB)
                assert report.blocks > 0
                file.unlink()
                stored = [prompt for prompt in stored if readable(store, [prompt])]
                again, reasons = fill(store, first + 50, 2)
                assert (len(again), reasons) == (2, set())
                stored += again
            assert store.verify(data=True).problems == []
        fill_the_rest(volume)
        with kvdb.open(volume / "store") as store:
            assert readable(store, stored) == len(stored)
            assert store.verify(data=True).problems == []


def test_disk_too_small_is_refused_at_the_start(tmp_path: Path) -> None:
    with small_volume(tmp_path / "volume", 2 * MIB) as volume:
        with pytest.raises((OutOfSpace, StoreUnavailable), match="MiB"):
            kvdb.open(volume / "store")
        assert not (volume / "store").exists()


def test_unwritable_volume_is_refused_and_can_be_read(tmp_path: Path) -> None:
    with small_volume(tmp_path / "volume", 20 * MIB) as volume:
        with kvdb.open(volume / "store", max_bytes=16 * MIB, min_free_bytes=0) as store:
            stored, _ = fill(store, 0, 3)
        assert _mounted("-o", "remount,ro", str(volume))
        with pytest.raises(KvdbError):
            kvdb.open(volume / "store")
        with kvdb.open(volume / "store", read_only=True) as store:
            matches = [
                store.match(store.namespaces()[0], random_tokens(prompt, 4 * BLOCK))
                for prompt in stored
            ]
            assert all(match.complete for match in matches)
        assert _mounted("-o", "remount,rw", str(volume))
        with kvdb.open(volume / "store") as store:
            assert readable(store, stored) == len(stored)
            assert fill(store, 60, 1)[1] == set()
            assert store.verify(data=True).problems == []


@needs_strace
@pytest.mark.parametrize("error", ["EROFS", "EIO", "ENOSPC"])
def test_unwritable_volume_while_running_is_said_in_types(
    zygote: Zygote, path: Path, error: str
) -> None:
    """Every call that writes fails from now on, in all threads; then the cause goes away."""
    worker = zygote.start("disturbed", path)
    worker.expect("ready")
    inject = f"inject={WRITES}:error={error}:when=1+"
    with traced(worker, worker.pid, "-f", "-o", "/dev/null", "-e", f"trace={WRITES}", "-e", inject):
        worker.say()
        lines = worker.expect("ready")
    said = dict(line.split(maxsplit=2)[1:] for line in lines if line.startswith("verb"))
    assert {"put", "read", "evict", "verify"} <= set(said)
    assert not {verb: word for verb, word in said.items() if word.startswith("UNTYPED")}, said
    assert said["match"] == said["read"] == "ok"
    worker.say()
    assert worker.rest()[-2:] == ["recovered 1", "done"]
    assert worker.wait() == 0
    with kvdb.open(path) as store:
        assert readable(store, [70]) == 1
        assert store.verify(data=True).problems == []


@pytest.mark.parametrize("what", ["all", "shards", "index"])
def test_vanished_directory_while_running_is_said_in_types(path: Path, what: str) -> None:
    store = kvdb.open(path, max_bytes=16 * MIB, min_free_bytes=0)
    namespace = wide(store)
    fill(store, 0, 3)
    if what == "all":
        shutil.rmtree(path)
    elif what == "shards":
        shutil.rmtree(path / "shards")
    else:
        for suffix in ("", "-wal", "-shm"):
            (path / f"index.sqlite{suffix}").unlink()
    said = everything(store, namespace, 50)
    said["close"] = outcome(store.close)
    assert not {verb: word for verb, word in said.items() if word.startswith("UNTYPED")}, said
    if what == "index" and (path / "shards").is_dir():
        kvdb.rebuild(path)
    with kvdb.open(path) as store:
        assert fill(store, 70, 1) == ([70], set())
        assert store.verify(data=True, repair=True).ok
        assert readable(store, [70]) == 1


def test_no_descriptor_left_loses_no_block(path: Path) -> None:
    """What cannot be read now is a miss, and is there again later."""
    import resource

    with kvdb.open(path) as store:
        stored, _ = fill(store, 0, 3)
    with kvdb.open(path) as store:
        namespace = wide(store)
        matches = [store.match(namespace, random_tokens(p, 4 * BLOCK)) for p in stored]
        assert all(match.complete for match in matches)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = max(int(name) for name in os.listdir("/dev/fd")) + 1  # noqa: PTH208
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, before[1]))
        try:
            said = outcome(lambda: readable(store, stored))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert not said.startswith("UNTYPED"), said
        assert readable(store, stored) == len(stored)
        assert store.sql("SELECT count(*) FROM evictions").rows == [(0,)]
