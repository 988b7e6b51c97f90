"""A full volume: stores open, evict and recover on it. Needs a small file system of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvdb
from kvdb.ballast import BALLAST_BYTES, BALLAST_NAME
from tests.support import BLOCK, check_prefix, open_namespace, payloads, put_all, random_tokens


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """An empty 24 MB file system."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(tmp_path)],  # noqa: S607
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)  # noqa: S607


def fill_up(volume: Path) -> Path:
    """A file that takes every byte that is left."""
    file = volume / "filler"
    with file.open("wb", buffering=0) as handle:
        for size in (1 << 20, 1 << 12):
            while True:
                try:
                    if handle.write(bytes(size)) < size:
                        break
                except OSError:
                    break
    return file


def test_disk_full_stops_puts_keeps_reads_and_recovers_when_space_returns(volume: Path) -> None:
    path = volume / "store"
    tokens = random_tokens(1, 3 * BLOCK)
    with kvdb.open(path, max_bytes=16 << 20, min_free_bytes=0) as store:
        namespace = open_namespace(store)
        put_all(store, namespace, tokens)
        filler = fill_up(volume)
        other = random_tokens(2, 3 * BLOCK)
        result = store.put(namespace, other, payloads(namespace, other)).wait(30)
        assert result.dropped == 3
        assert result.reason is not None
        assert check_prefix(store, namespace, tokens) == 3 * BLOCK
        assert check_prefix(store, namespace, other) == 0
        filler.unlink()
        put_all(store, namespace, other)
        assert check_prefix(store, namespace, other) == 3 * BLOCK
        assert store.verify(data=True).problems == []


def test_a_store_on_a_full_disk_opens_and_evicts_by_its_ballast(volume: Path) -> None:
    path = volume / "store"
    tokens = random_tokens(1, 30 * BLOCK)
    with kvdb.open(path, max_bytes=16 << 20, min_free_bytes=0) as store:
        put_all(store, open_namespace(store), tokens)
    assert (path / BALLAST_NAME).stat().st_size == BALLAST_BYTES
    filler = fill_up(volume)
    with kvdb.open(path) as store:
        assert not (path / BALLAST_NAME).exists()
        namespace = open_namespace(store)
        assert check_prefix(store, namespace, tokens) == 30 * BLOCK
        assert store.evict(to_bytes=0).blocks == 30
        assert store.verify(data=True).problems == []
        filler.unlink()
        put_all(store, namespace, tokens)
    with kvdb.open(path):
        assert (path / BALLAST_NAME).exists()
