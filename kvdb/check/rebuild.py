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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdb import driver, holding, index
from kvdb.backup import BACKUP_NAME
from kvdb.builds import find_or_add_build
from kvdb.clock import Environment
from kvdb.driver import Connection, Database
from kvdb.durable import FileSystem
from kvdb.errors import (
    IntegrityError,
    KvdbError,
    NotAStore,
    OutOfSpace,
    StoreMissing,
    StoreTooNew,
)
from kvdb.identity import ROOT_PARENT, encode_extra
from kvdb.limit import MIN_MAX_BYTES
from kvdb.locks import WriterLock
from kvdb.opening import DEFAULT_SETTINGS, FOLDERS, claim_store, usable
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
            _recover_rest(database, root, report)
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
        token_count=len(block.tokens),
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


def _recover_rest(database: Database, root: Path, report: RebuildReport) -> None:
    """Sequences, history, settings and ticks from the old index, else from its backup."""
    with database.read() as connection:
        own_columns = {row[1] for row in connection.execute("PRAGMA table_info(requests)")}
    for name in (driver.INDEX_NAME, BACKUP_NAME):
        source = root / name
        if not source.exists():
            continue
        try:
            # Nobody writes the backup: opened as it is, SQLite puts no files beside it.
            old = driver.connect(source, read_only=True, immutable=name == BACKUP_NAME)
        except OutOfSpace:
            raise  # the old index may be sound: with room it is read
        except (KvdbError, driver.sqlite3.Error):
            continue
        try:
            driver.schema_state(old, source)
            rest = _read_rest(old, own_columns)
        except StoreTooNew:
            raise
        except (KvdbError, driver.sqlite3.Error):
            continue
        finally:
            old.close()
        _write_rest(database, rest, report)
        return
    with database.write() as connection:
        _set_settings(connection, [])
    report.lost.append("named sequences, request history and settings: no readable index or backup")


@dataclass(slots=True)
class _Rest:
    """Rows of an old index that shards do not hold; blocks by hash."""

    settings: list[tuple[str, str]]
    counters: list[tuple[str, int]]
    sequences: list[tuple[str, bytes | None, bytes, str, int | None, int]]
    request_columns: list[str]
    requests: list[tuple[Any, ...]]
    access: list[tuple[bytes, str, int, int, int, int]]


KEPT_COUNTERS = ("tick", "age_ratio", "cow_copies", "blocks_dropped", "blocks_too_large")


def _read_rest(old: Connection, own_columns: set[str]) -> _Rest:
    columns = [row[1] for row in old.execute("PRAGMA table_info(requests)")]
    if not set(columns) <= own_columns:
        raise IntegrityError("The old index's history has columns that nobody made.")
    return _Rest(
        settings=old.execute("SELECT key, value FROM settings").fetchall(),
        counters=[
            row
            for row in old.execute("SELECT name, value FROM counters").fetchall()
            if row[0] in KEPT_COUNTERS
        ],
        sequences=old.execute(
            "SELECT s.name, b.hash, n.fingerprint, s.tenant, s.expires_at, s.created_at "
            "FROM sequences AS s JOIN namespaces AS n ON n.id = s.namespace_id "
            "LEFT JOIN blocks AS b ON b.id = s.tip_id WHERE s.name IS NOT NULL"
        ).fetchall(),
        request_columns=columns,
        requests=old.execute(
            "SELECT r.*, n.fingerprint, b.hash, t.hash FROM requests AS r "
            "LEFT JOIN namespaces AS n ON n.id = r.namespace_id "
            "LEFT JOIN blocks AS b ON b.id = r.deepest_block_id "
            "LEFT JOIN blocks AS t ON t.id = r.tip_id ORDER BY r.id"
        ).fetchall(),
        access=old.execute(
            "SELECT hash, queue, last_access, prev_access, hits, created_at FROM blocks "
            "WHERE state = 'live'"
        ).fetchall(),
    )


def _set_settings(connection: Connection, settings: list[tuple[str, str]]) -> int:
    """Returns how many settings are of no use: those of a damaged index may be anything."""
    usable = {key: value for key, value in settings if _usable_setting(key, value)}
    insert = "INSERT OR REPLACE INTO settings (key, value) VALUES (?, ?)"
    refused = _each(connection, insert, {**DEFAULT_SETTINGS, **usable}.items())
    return refused + len(settings) - len(usable)


def _usable_setting(key: object, value: object) -> bool:
    if key not in ("max_bytes", "min_free_bytes"):
        return isinstance(key, str) and isinstance(value, str)
    at_least = MIN_MAX_BYTES if key == "max_bytes" else 0
    return isinstance(value, str) and value.isdecimal() and int(value) >= at_least


def _each(connection: Connection, statement: str, rows: Iterable[Sequence[object]]) -> int:
    """Run a statement once a row; returns how many rows the index refused."""
    refused = 0
    for row in rows:
        try:
            connection.execute(statement, row)
        except driver.sqlite3.IntegrityError:
            refused += 1
    return refused


def _write_rest(database: Database, rest: _Rest, report: RebuildReport) -> None:
    refused = 0
    with database.write() as connection:
        refused += _set_settings(connection, rest.settings)
        set_counter = "UPDATE counters SET value = ?2 WHERE name = ?1"
        refused += _each(connection, set_counter, rest.counters)
        for name, tip, fingerprint, tenant, expires, created in rest.sequences:
            namespace = connection.execute(index.FIND_NAMESPACE, (fingerprint,)).fetchone()
            block = None if tip is None else index.find_block(connection, tip)
            if namespace is None or (tip is not None and block is None):
                report.lost.append(f"sequence {name!r}: its blocks are gone")
                continue
            try:
                holding.add_sequence(
                    connection,
                    name=name,
                    namespace_id=namespace[0],
                    tip_id=None if block is None else block.id,
                    process_id=None,
                    tenant=tenant,
                    expires_at=expires,
                    now=created,
                )
            except driver.sqlite3.IntegrityError as error:
                report.lost.append(f"sequence {name!r}: {error}")
                continue
            report.sequences += 1
    for start in range(0, len(rest.access), BLOCKS_PER_TRANSACTION):
        with database.write() as connection:
            refused += _each(
                connection,
                "UPDATE blocks SET queue = ?2, last_access = ?3, prev_access = ?4, hits = ?5, "
                "created_at = ?6 WHERE hash = ?1",
                rest.access[start : start + BLOCKS_PER_TRANSACTION],
            )
    columns = rest.request_columns
    ids = ("namespace_id", "deepest_block_id", "tip_id")
    positions = {name: columns.index(name) for name in ids}
    insert = (
        f"INSERT INTO requests ({', '.join(columns)}) "  # noqa: S608 - names of our own table
        f"VALUES ({', '.join('?' * len(columns))})"
    )
    for start in range(0, len(rest.requests), BLOCKS_PER_TRANSACTION):
        with database.write() as connection:
            for row in rest.requests[start : start + BLOCKS_PER_TRANSACTION]:
                values, (fingerprint, deepest, tip) = list(row[:-3]), row[-3:]
                namespace = connection.execute(index.FIND_NAMESPACE, (fingerprint,)).fetchone()
                values[positions["namespace_id"]] = None if namespace is None else namespace[0]
                for column, hash_ in (("deepest_block_id", deepest), ("tip_id", tip)):
                    block = index.find_block(connection, hash_) if hash_ is not None else None
                    values[positions[column]] = None if block is None else block.id
                refused += _each(connection, insert, [values])
    if refused:
        report.lost.append(f"{refused} rows of the old index that are damaged")


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
    with contextlib.suppress(KvdbError, driver.sqlite3.Error):
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
