"""rebuild: make a new index from the shards, which describe themselves.

Shards give back namespaces, blocks and parts. Named sequences, history and settings come from the
old index if it still reads, else from ``index.backup``; what neither has is lost, and said.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvdb import driver, index
from kvdb.builds import find_or_add_build
from kvdb.check.salvage import recover_rest
from kvdb.clock import Environment
from kvdb.driver import Connection, Database
from kvdb.durable import FileSystem
from kvdb.errors import (
    IntegrityError,
    KvdbError,
    NotAStore,
    StoreMissing,
)
from kvdb.identity import ROOT_PARENT, encode_extra
from kvdb.locks import WriterLock
from kvdb.opening import FOLDERS, claim_store, usable
from kvdb.shards import NamespaceRecord, ShardBlock, read_shard_content

NEW_INDEX = "index.rebuilding"
SET_ASIDE = "index.set-aside"
BLOCKS_PER_TRANSACTION = 500
# What speaks against a shard itself, and not against this attempt to read it.
FILE_ERRORS = (errno.EIO, errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO)
UUID = re.compile("[0-9a-f]{32}")


@dataclass(slots=True)
class RebuildReport:
    """What was restored; ``skipped`` shards could not be read, ``lost`` says what is gone, and
    ``set_aside`` is where the old index went."""

    namespaces: int = 0
    blocks: int = 0
    parts: int = 0
    nbytes: int = 0
    skipped: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    sequences: int = 0
    set_aside: Path | None = None


@dataclass(slots=True)
class _Found:
    """One block as some shards describe it: (shard uuid, description) of each."""

    record: NamespaceRecord
    places: list[tuple[str, ShardBlock]]


def rebuild_store(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] | None = None,
    environment: Environment | None = None,
) -> RebuildReport:
    """Make the index of the store at ``path`` anew, alone on the store.

    The new index is built beside the old one, which has its WAL moved in and gets a second name;
    then the new one takes its place in one rename: a crash leaves the old state or the new.
    Raises StoreMissing, NotAStore, StoreLocked, StoreTooNew.
    """
    root = Path(path).absolute()
    with usable(root):
        return _rebuild(root, environment or Environment(), progress)


def _rebuild(
    root: Path, environment: Environment, progress: Callable[[int, int], None] | None
) -> RebuildReport:
    fs = FileSystem()
    if root.exists() and not root.is_dir():
        raise NotAStore(f"{root} is a file, not a kvdb store.")
    if not (root / "shards").is_dir():
        raise StoreMissing(f"There is no kvdb store at {root}.")
    lock = claim_store(root)
    try:
        for name in FOLDERS:
            (root / name).mkdir(mode=0o700, exist_ok=True)
        report = RebuildReport()
        target = root / NEW_INDEX
        _remove_index(target)
        writer_lock = WriterLock(root / "writer.lock")
        database = Database(target, writer_lock=writer_lock)
        try:
            with writer_lock.hold():
                database.open()
                database.migrate()
            blocks, sizes = _scan(root, report, progress)
            _fill(database, environment, blocks, sizes, report)
            report.sequences, lost = recover_rest(database, root)
            report.lost += lost
            database.checkpoint()
        finally:
            database.close()
            writer_lock.close()
        for leftover in (root / "tmp").iterdir():
            if not leftover.is_dir():
                fs.unlink(leftover)
        report.set_aside = _swap(fs, root, target, environment)
        return report
    finally:
        lock.release()


def _scan(
    root: Path, report: RebuildReport, progress: Callable[[int, int], None] | None
) -> tuple[dict[bytes, _Found], dict[str, tuple[int, int]]]:
    """Every block that any readable shard describes, and the shards' sizes: (file, parts) in
    bytes."""
    files = sorted((root / "shards").glob("??/*.safetensors"))
    found: dict[bytes, _Found] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for done, file in enumerate(files):
        if progress is not None:
            progress(done, len(files))
        if not UUID.fullmatch(file.stem):
            report.skipped.append(f"{file.name}: not named by kvdb")
            continue
        try:
            content = read_shard_content(file)
        except (IntegrityError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in FILE_ERRORS:
                raise  # it may be sound: with descriptors, memory, permission it is read
            report.skipped.append(f"{file.name}: {error}")
            continue
        parts = [part.nbytes for block in content.blocks for part in block.parts]
        sizes[file.stem] = content.nbytes, sum(parts)
        for block in content.blocks:
            entry = found.setdefault(block.hash, _Found(content.namespace, []))
            entry.places.append((file.stem, block))
    if progress is not None:
        progress(len(files), len(files))
    return found, sizes


def _fill(
    database: Database,
    environment: Environment,
    found: dict[bytes, _Found],
    sizes: dict[str, tuple[int, int]],
    report: RebuildReport,
) -> None:
    now = environment.now_us()
    namespaces: dict[bytes, int] = {}
    builds: dict[tuple[int, str], int] = {}
    shards: dict[str, int] = {}
    ids: dict[bytes, int] = {}
    for batch in _batches(found):
        with database.write() as connection:
            for hash_, depth in batch:
                entry = found[hash_]
                fingerprint = entry.record.fingerprint
                if fingerprint not in namespaces:
                    namespaces[fingerprint] = index.ensure_namespace(connection, entry.record, now)
                namespace_id = namespaces[fingerprint]
                parent = entry.places[0][1].parent
                if parent != ROOT_PARENT and parent not in ids:
                    continue  # its payload was incomplete: said below with the rest
                for uuid, block in entry.places:
                    if uuid not in shards:
                        shards[uuid] = _add_shard(connection, uuid, namespace_id, sizes[uuid], now)
                    if block.build is not None and (namespace_id, block.build) not in builds:
                        builds[namespace_id, block.build] = find_or_add_build(
                            connection, namespace_id, block.build, "{}", now
                        ).id
                block_id = _add_block(connection, entry, namespace_id, depth, ids, builds, now)
                if block_id is None:
                    report.lost.append(f"block {hash_.hex()[:16]}: its payload is incomplete")
                    continue
                ids[hash_] = block_id
                report.blocks += 1
                _add_parts(connection, entry, block_id, shards, report)
    report.lost += [
        f"block {hash_.hex()[:16]}: its parent is gone"
        for hash_, entry in found.items()
        if hash_ not in ids and entry.places[0][1].parent not in (*ids, ROOT_PARENT)
    ]
    with database.write() as connection:
        for uuid, size in sizes.items():
            if uuid not in shards:  # nothing of it is usable: give its bytes back at the next open
                any_namespace = next(iter(namespaces.values()), None)
                if any_namespace is not None:
                    shards[uuid] = _add_shard(connection, uuid, any_namespace, size, now)
        index.kill_if_empty(connection, shards.values())
    report.namespaces = len(namespaces)


def _batches(found: dict[bytes, _Found]) -> Iterator[list[tuple[bytes, int]]]:
    """(hash, depth) of every block that a root leads to, parents before children. The depth is
    counted, not believed: no hash covers it."""
    children: dict[bytes, list[bytes]] = defaultdict(list)
    for hash_, entry in found.items():
        children[entry.places[0][1].parent].append(hash_)
    level, depth = children[ROOT_PARENT], 0
    while level:
        for start in range(0, len(level), BLOCKS_PER_TRANSACTION):
            yield [(hash_, depth) for hash_ in level[start : start + BLOCKS_PER_TRANSACTION]]
        level = [child for hash_ in level for child in children.get(hash_, ())]
        depth += 1


def _add_shard(
    connection: Connection, uuid: str, namespace_id: int, size: tuple[int, int], now: int
) -> int:
    nbytes, part_bytes = size
    (shard_id,) = connection.execute(
        index.INSERT_SHARD, (uuid, namespace_id, None, nbytes, now)
    ).fetchone()
    connection.execute(index.PUBLISH_SHARD, (nbytes, part_bytes, shard_id))
    return int(shard_id)


def _add_block(
    connection: Connection,
    entry: _Found,
    namespace_id: int,
    depth: int,
    ids: dict[bytes, int],
    builds: dict[tuple[int, str], int],
    now: int,
) -> int | None:
    """Insert a block if its required parts are all there; its row id."""
    required = set(entry.record.layout.required)
    whole = [
        block for _, block in entry.places if required.issubset({part.part for part in block.parts})
    ]
    if not whole:
        return None
    # An exact twin is worth more than an inexact one.
    block = max(whole, key=lambda b: b.exact)
    return index.insert_block(
        connection,
        hash_=block.hash,
        parent_id=ids.get(block.parent),
        namespace_id=namespace_id,
        depth=depth,
        token_count=block.token_count,
        origin=block.origin,
        exact=block.exact,
        build_id=None if block.build is None else builds[namespace_id, block.build],
        now=now,
        tick=index.next_tick(connection),
        tokens=block.tokens.tobytes(),
        extra=encode_extra(block.extra),
    )


def _add_parts(
    connection: Connection,
    entry: _Found,
    block_id: int,
    shards: dict[str, int],
    report: RebuildReport,
) -> None:
    required = set(entry.record.layout.required)
    # The same copy that gave the block its row comes first, so exact bytes go under an exact row.
    places = sorted(
        entry.places,
        key=lambda place: (
            required.issubset({part.part for part in place[1].parts}),
            place[1].exact,
        ),
        reverse=True,
    )
    have: set[str] = set()
    for uuid, block in places:
        for part in block.parts:
            if part.part in have:
                continue
            have.add(part.part)
            index.insert_parts(
                connection,
                [
                    (
                        block_id,
                        part.part,
                        shards[uuid],
                        part.offset,
                        part.nbytes,
                        part.raw_nbytes,
                        part.codec,
                        part.checksum,
                    )
                ],
            )
            report.parts += 1
            report.nbytes += part.nbytes


def _remove_index(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _swap(fs: FileSystem, root: Path, new: Path, environment: Environment) -> Path | None:
    """Give the new index its name; the old one stays under another, and older ones go."""
    current = root / driver.INDEX_NAME
    aside: Path | None = None
    earlier = list(root.glob(f"{SET_ASIDE}.*"))
    if current.exists():
        _absorb_wal(current)
        aside = root / f"{SET_ASIDE}.{environment.now_us()}"
        _second_name(current, aside)
        for suffix in ("-wal", "-shm"):  # only of an index that SQLite could not open
            file = current.with_name(current.name + suffix)
            if file.exists():
                _second_name(file, aside.with_name(aside.name + suffix))
                fs.unlink(file)
    else:
        _remove_index(current)  # a WAL without its file would be replayed into the new one
    fs.rename(new, current)
    fs.sync_directory(root)
    for file in earlier:
        fs.unlink(file)
    return aside


def _absorb_wal(path: Path) -> None:
    """Move an index's WAL into it, if SQLite can still open it: else a crash before the rename
    would leave it without its newest commits."""
    with contextlib.suppress(KvdbError, driver.sqlite3.Error, UnicodeDecodeError):
        connection = driver.connect(path)
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            connection.close()


def _second_name(path: Path, name: Path) -> None:
    try:
        name.hardlink_to(path)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, name)
