"""Damaged and forged snapshots: refused or equal, the store unchanged, nothing outside it."""

from __future__ import annotations

import io
import json
import os
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvdb
from kvdb.errors import KvdbError, SnapshotRejected, UsageError
from kvdb.snapshot import staging
from kvdb.store import Store
from tests.snapshots.mutations import (
    canonical,
    change_json,
    members,
    mutate,
    signed,
    tar_of,
    with_head,
)
from tests.snapshots.test_members import other_tokens
from tests.snapshots.world import blocks, fill, snapshot_of
from tests.support import check_prefix, open_namespace, put_all, random_tokens

OWN = random_tokens(77, 60)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    with kvdb.open(tmp_path_factory.mktemp("good") / "a") as store:
        fill(store)
        return snapshot_of(store)


@pytest.fixture(scope="module")
def true_blocks(good: bytes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return {name: data for name, data in members(good) if name.startswith("blocks/")}


class Target:
    """A store with something in it, whose every change is seen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store: Store = kvdb.open(folder / "store")
        put_all(self.store, open_namespace(self.store), OWN)
        self.before = self.state()

    def state(self) -> tuple[object, ...]:
        tables = ("namespaces", "blocks", "parts", "block_tokens", "builds", "snapshots", "shards")
        with self.store.database.read() as connection:
            rows = [connection.execute(f"SELECT * FROM {t}").fetchall() for t in tables]  # noqa: S608
        files = sorted(
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*")
            if path.is_file() and not path.name.startswith("index.")
        )
        return rows, files

    def takes(self, data: bytes) -> bool:
        """Import; False when it is refused, then in one sentence and without a trace."""
        refused: SnapshotRejected | None = None
        try:
            self.store.import_snapshot(io.BytesIO(data))
        except SnapshotRejected as error:
            refused = error
        if refused is None:
            return True
        assert len(str(refused)) < 400
        assert self.state() == self.before
        return False


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    made = Target(tmp_path / "target")
    yield made
    made.store.close()


def run_mutations(
    good: bytes, true_blocks: dict[str, bytes], folder: Path, seed: int, count: int
) -> int:
    """Try ``count`` mutations; returns how many were taken. What is taken is true."""
    choose = random.Random(seed)
    taken = 0
    target = Target(folder / "0")
    for number in range(count):
        data = mutate(good, choose)
        if not target.takes(data):
            continue
        taken += 1
        kept = members(snapshot_of(target.store))
        came = {hash_of(name): data for name, data in kept if name.startswith("blocks/")}
        truth = {hash_of(name): data for name, data in true_blocks.items()}
        own = {h.hex() for h in target.store.match(open_namespace(target.store), OWN).hashes}
        assert {h: d for h, d in came.items() if h not in own}.items() <= truth.items(), number
        assert target.store.verify(data=True).problems == []
        target.store.close()
        target = Target(folder / str(number + 1))
    assert check_prefix(target.store, open_namespace(target.store), OWN) == len(OWN)
    target.store.close()
    assert {path.name for path in folder.iterdir()} <= set(map(str, range(count + 1)))
    return taken


def hash_of(name: str) -> str:
    return name.rsplit("/", 1)[1].split(".")[0]


def test_mutations(
    good: bytes, true_blocks: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both with nothing staged when the flaw is met, and with much."""
    assert Target(tmp_path / "first").takes(good)
    folder = tmp_path / "short"
    folder.mkdir()
    taken = run_mutations(good, true_blocks, folder, 1, 250)
    monkeypatch.setattr(staging, "RUN_BYTES", 4096)
    folder = tmp_path / "staged"
    folder.mkdir()
    taken += run_mutations(good, true_blocks, folder, 2, 50)
    assert 0 < taken < 60


@pytest.mark.torture
def test_many_mutations(
    good: bytes, true_blocks: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "RUN_BYTES", 8192)
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run_mutations(good, true_blocks, folder, 1000 + seed, 500)


# -- by name -------------------------------------------------------------------------------------


def special(kind: bytes, name: str = "blocks/0/" + "0" * 64 + ".safetensors") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info.tobuf(tarfile.USTAR_FORMAT)


def pax(name: str, value: str) -> bytes:
    info = tarfile.TarInfo("blocks/0/x")
    info.pax_headers = {name: value}
    return info.tobuf(tarfile.PAX_FORMAT)


def with_mode(data: bytes, mode: int) -> bytes:
    info = tarfile.TarInfo.frombuf(data[:512], "ascii", "strict")
    info.mode = mode
    return info.tobuf(tarfile.USTAR_FORMAT) + data[512:]


def manifest_with(good: bytes, change: Callable[[dict], object]) -> bytes:
    parts = members(good)
    document = json.loads(parts[0][1])
    change(document)
    parts[0] = parts[0][0], canonical(document) + b"\n"
    return signed(parts)


def rename(good: bytes, at: int, name: str) -> bytes:
    parts = members(good)
    parts[at] = name, parts[at][1]
    return signed(parts)


def bomb(good: bytes) -> bytes:
    """A part of some KB that decodes to 1 GiB, by its own frame."""
    import numpy as np
    import zstandard

    from kvdb.identity import Checksum

    frame = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    parts = members(good)
    name, data = parts[1]

    def change(described: dict) -> dict:
        part = described["parts"][0]
        checksum = Checksum(bytes.fromhex(described["hash"]), part[0])
        checksum.update(np.frombuffer(frame, np.uint8).data)
        described["parts"] = [[part[0], "zstd", len(frame), part[3], checksum.digest().hex()]]
        return described

    parts[1] = name, with_head(data, change) + frame
    return signed(parts)


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda g: b"",
    "one byte": lambda g: g[:1],
    "wrong magic": lambda g: b"PK\x03\x04" + g[4:],
    "zeros": lambda g: bytes(4096),
    "truncated": lambda g: g[: len(g) // 2],
    "without its end": lambda g: g[:-1024],
    "trailing junk": lambda g: g + b"x",
    "concatenated": lambda g: g + g,
    "gzip in tar": lambda g: b"\x1f\x8b" + g,
    "absolute path": lambda g: rename(g, 1, "/tmp/evil"),
    "parent path": lambda g: rename(g, 1, "../../evil"),
    "case-fold twin": lambda g: rename(g, 2, members(g)[1][0].upper()),
    "name of another block": lambda g: rename(g, 1, members(g)[2][0]),
    "symlink": lambda g: tar_of([members(g)[0], special(tarfile.SYMTYPE), *members(g)[1:]]),
    "hard link": lambda g: tar_of([members(g)[0], special(tarfile.LNKTYPE), *members(g)[1:]]),
    "device": lambda g: tar_of([members(g)[0], special(tarfile.CHRTYPE), *members(g)[1:]]),
    "FIFO": lambda g: tar_of([members(g)[0], special(tarfile.FIFOTYPE), *members(g)[1:]]),
    "folder": lambda g: tar_of([members(g)[0], special(tarfile.DIRTYPE), *members(g)[1:]]),
    "sparse": lambda g: tar_of([members(g)[0], special(b"S"), *members(g)[1:]]),
    "PAX size": lambda g: tar_of([members(g)[0], pax("size", "9" * 12), *members(g)[1:]]),
    "long name": lambda g: tar_of([members(g)[0], special(b"L", "x" * 90), *members(g)[1:]]),
    "setuid": lambda g: with_mode(g, 0o4755),
    "twice the same": lambda g: signed([*members(g)[:2], *members(g)[1:]]),
    "missing digests": lambda g: tar_of(members(g)[:-1]),
    "wrong digest": lambda g: tar_of([*members(g)[:-1], ("SHA256SUMS", members(g)[-1][1][::-1])]),
    "missing member": lambda g: tar_of([members(g)[0], *members(g)[2:]]),
    "extra member": lambda g: tar_of([*members(g)[:-1], ("evil", b"x"), members(g)[-1]]),
    "child before parent": lambda g: signed([members(g)[0], *members(g)[:0:-1]]),
    "no manifest": lambda g: signed(members(g)[1:]),
    "newer format": lambda g: manifest_with(g, lambda m: m.update(format=2)),
    "other kind": lambda g: manifest_with(g, lambda m: m.update(kind="else")),
    "unknown codec": lambda g: manifest_with(g, lambda m: m["codecs"].update(pickle={})),
    "wrong fingerprint": lambda g: manifest_with(
        g, lambda m: m["namespaces"][0].update(fingerprint="0" * 64)
    ),
    "other block size": lambda g: manifest_with(
        g, lambda m: m["namespaces"][0].update(block_tokens=32)
    ),
    "a shipped database": lambda g: signed([members(g)[0], ("index.sqlite", b"SQLite format 3\0")]),
    "bomb": bomb,
    "other tokens": lambda g: signed(
        [members(g)[0], (members(g)[1][0], other_tokens(members(g)[1][1])), *members(g)[2:]]
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile(kind: str, good: bytes, target: Target) -> None:
    data = HOSTILE[kind](good)
    if kind == "child before parent":
        # Not a lie, only of no use: what stands on nothing is left out.
        report = target.store.import_snapshot(io.BytesIO(data))
        assert report.incompatible["parent_missing"] > 0
        assert target.store.verify(data=True).problems == []
    else:
        assert not target.takes(data)


def test_a_million_members_are_read_and_not_kept(good: bytes, target: Target) -> None:
    """Here some thousand: refused at the first that is no block."""
    flood = [members(good)[0], *((f"blocks/0/{n}", b"") for n in range(5000))]
    assert not target.takes(signed(flood))


def test_what_is_no_file(tmp_path: Path, good: bytes, target: Target) -> None:
    (tmp_path / "good").write_bytes(good)
    (tmp_path / "link").symlink_to(tmp_path / "good")
    os.mkfifo(tmp_path / "fifo")
    for name in ("missing", "link", "fifo", "."):
        with pytest.raises(UsageError):
            target.store.import_snapshot(tmp_path / name)
    assert target.state() == target.before


def test_a_forged_manifest_does_not_break_the_program(good: bytes, target: Target) -> None:
    choose = random.Random(3)
    parts = members(good)
    for _ in range(150):
        forged = [(parts[0][0], change_json(parts[0][1], choose)), *parts[1:]]
        if target.takes(signed(forged)):
            assert target.store.verify().problems == []
            assert blocks(target.store) >= {hash_of(name) for name, _ in parts[1:-1]}
            break


def test_disk_full(good: bytes, tmp_path: Path) -> None:
    """With too little room nothing is evicted for a pipe's unverified bytes; a file, once it is
    verified, may push out the least useful."""
    with (
        kvdb.open(tmp_path / "small", max_bytes=16 << 20) as small,
        kvdb.open(tmp_path / "big") as big,
    ):
        namespace = open_namespace(small, weights="full", block_tokens=4096)
        for seed in range(40):
            put_all(small, namespace, random_tokens(seed, 4096))
            if len(blocks(small)) <= seed:
                break
        kept = blocks(small)
        other = open_namespace(big, weights="other", block_tokens=4096)
        for seed in range(3):
            put_all(big, other, random_tokens(seed, 4096))
        data = snapshot_of(big)
        with pytest.raises(KvdbError) as full:
            small.import_snapshot(io.BytesIO(data))
        assert full.value.exit_code == 1
        assert blocks(small) == kept
        (tmp_path / "bad.tar").write_bytes(data[:-2000] + data[-1000:])
        with pytest.raises(SnapshotRejected):
            small.import_snapshot(tmp_path / "bad.tar")
        assert blocks(small) == kept
        (tmp_path / "good.tar").write_bytes(data)
        assert small.import_snapshot(tmp_path / "good.tar").stored == 3
        assert small.used_bytes() <= 16 << 20
        assert blocks(small) & kept < kept
        assert small.verify(data=True).problems == []
