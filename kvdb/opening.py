"""Opening a store: folder, locks, index, migrations, settings, recovery."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvdb import driver, index, recovery
from kvdb.backup import write_backup
from kvdb.ballast import Ballast, spend_ballast
from kvdb.clock import Environment
from kvdb.codecs import Codec, get_codec
from kvdb.commit import Committer
from kvdb.compaction import Compactor
from kvdb.damage import DamageDesk
from kvdb.driver import Database
from kvdb.durable import FileSystem
from kvdb.errors import (
    IntegrityError,
    KvdbError,
    NotAStore,
    OutOfSpace,
    StoreLocked,
    StoreMissing,
    StoreUnavailable,
    UsageError,
)
from kvdb.limit import MIN_MAX_BYTES, Limit, default_max_bytes, default_min_free_bytes, volume_bytes
from kvdb.locks import FileLock, WriterLock
from kvdb.ramtier import RamTier
from kvdb.reader import Bytes, ShardReader
from kvdb.reservation import Reservations
from kvdb.retention import Retention
from kvdb.room import Room
from kvdb.spread import MAX_WORKERS, Spreader
from kvdb.store import Store
from kvdb.writer import Writer

FOLDERS = ("shards", "tmp", "processes")
DEFAULT_SETTINGS = {
    "history_requests": "100000",
    "history_evictions": "100000",
    "history_hours": "2208",  # 92 days
}
# Options that the store itself remembers.
REMEMBERED = ("max_bytes", "min_free_bytes", *DEFAULT_SETTINGS)
DEFAULT_QUEUE_BYTES = 256 << 20
DEFAULT_READ_AHEAD = 3
OUR_NAMES = (*FOLDERS, "store.lock", "writer.lock", "ballast")
LOCK_WAIT_SECONDS = 10.0
OLD_SCHEMA = "The store at {} has the older schema {}; run kvdb migrate."
NO_INDEX = "The index of {} is missing or empty but its shards are there; run kvdb rebuild."


class _OldSchema(KvdbError):
    """The store was made by an earlier program, and is to be migrated."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to open a store; see :func:`open_store`. ``ram`` is the budget of the RAM tier in bytes,
    ``read_workers`` threads read, and up to ``read_ahead`` blocks wait for who uses them. With
    ``remotes`` those that the store knows are used (kvdb/remotes/tier.py)."""

    create: bool = True
    read_only: bool = False
    max_bytes: int | None = None
    min_free_bytes: int | None = None
    durability: str = "process"
    codec: str = "raw"
    queue_bytes: int = DEFAULT_QUEUE_BYTES
    ram: int = 0
    read_workers: int = MAX_WORKERS
    read_ahead: int = DEFAULT_READ_AHEAD
    history_requests: int | None = None
    history_evictions: int | None = None
    history_hours: int | None = None
    program: str = "python"
    remotes: bool = False


def open_store(
    path: str | os.PathLike[str],
    options: Options,
    *,
    fs: FileSystem | None = None,
    environment: Environment | None = None,
) -> Store:
    """Open or create the store at ``path``; a store with an older schema is migrated first, which
    needs it for itself. Opened for reading it is left as it is, and refused.

    Raises StoreMissing (nothing there and ``create`` is False), NotAStore, StoreTooNew,
    StoreLocked, IntegrityError (damaged index), StoreUnavailable (folder or disk in the way).
    """
    root = Path(path).absolute()
    environment = environment or Environment()
    if options.durability not in ("process", "power"):
        raise UsageError(f"durability must be process or power, not {options.durability!r}.")
    codec = get_codec(options.codec)
    if options.ram < 0 or options.read_workers < 1 or options.read_ahead < 1:
        raise UsageError("ram must be 0 or more, read_workers and read_ahead at least 1.")
    with usable(root):
        if options.read_only:
            return _open_read_only(root, options, environment)
        fs = fs or FileSystem(full=options.durability == "power")
        _prepare_folder(fs, root, options.create)

        def attempt() -> Store:
            store_lock = share_store(root)
            try:
                return _open_writable(root, options, fs, environment, codec, store_lock)
            except BaseException:
                store_lock.release()
                raise

        # Opening a store on a full disk needs room of its own: the ballast's.
        try:
            return spend_ballast(root, attempt)
        except _OldSchema as old:
            try:
                spend_ballast(root, lambda: _migrate(root, wait=True))
            except StoreLocked as error:
                raise StoreLocked(f"{old} It is in use by another process: end that first.") from (
                    error
                )
            return spend_ballast(root, attempt)


@contextmanager
def usable(root: Path) -> Iterator[None]:
    """Turn what the file system refuses into StoreUnavailable, and what is no path into
    UsageError."""
    if "\0" in str(root):
        raise UsageError(f"{str(root)!r} is no path.")
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(
            f"The store at {root} cannot be used: {error.strerror or error}."
        ) from error


def _open_writable(
    root: Path,
    options: Options,
    fs: FileSystem,
    environment: Environment,
    codec: Codec,
    store_lock: FileLock,
) -> Store:
    writer_lock = WriterLock(root / "writer.lock")
    database = Database(
        root / driver.INDEX_NAME, writer_lock=writer_lock, durability=options.durability
    )
    process_lock: FileLock | None = None
    try:
        _create(database, writer_lock, root)
        limit = _limit(database, root, options)
        uuid = environment.new_uuid()
        process_lock = FileLock(recovery.process_lock_path(root, uuid))
        process_lock.acquire()
        process_id = recovery.register(
            database, uuid, os.getpid(), options.program, environment.now_us()
        )
        recovery.settle(database, fs, root, process_id)
        reader = ShardReader(root)
        ballast = Ballast(limit, fs)
        settle = partial(recovery.settle, database, fs, root, process_id)
        retention = Retention(database, limit, reader, fs, environment, ballast, settle)
        with database.read() as connection:
            unfinished = connection.execute(index.DEAD_SHARDS).fetchone()
        if unfinished is not None:
            retention.sweep_dead()
        ballast.ensure()
    except BaseException:
        database.close()
        writer_lock.close()
        if process_lock is not None:
            process_lock.release()
        raise
    damage = DamageDesk(database, environment, retention)
    reservations = Reservations(database, limit, fs, environment, process_id)
    compactor = Compactor(database, limit, reader, reservations, retention, damage.report)
    room = Room(database, limit, retention, reservations, compactor)
    spreader = Spreader(options.read_workers)
    ram: RamTier[Bytes] = RamTier(options.ram)
    committer = Committer(
        database,
        limit,
        retention,
        environment,
        codec,
        reservations,
        room,
        reader,
        spreader,
        ram,
    )
    writer = Writer(
        committer.commit,
        queue_bytes=options.queue_bytes,
        group_bytes=limit.shard_bytes,
        seconds=environment.seconds,
    )
    store = Store(
        root,
        database,
        limit,
        reader,
        fs,
        environment,
        retention=retention,
        compactor=compactor,
        room=room,
        damage=damage,
        spreader=spreader,
        ram=ram,
        read_ahead=options.read_ahead,
        writer=writer,
        process_id=process_id,
        locks=(store_lock, writer_lock),
        process_lock=process_lock,
        durability=options.durability,
    )
    if options.remotes:
        _attach_remotes(store, committer)
    return store


def _open_read_only(root: Path, options: Options, environment: Environment) -> Store:
    if root.is_file():
        raise NotAStore(f"{root} is a file, not a kvdb store.")
    if not root.is_dir():
        raise StoreMissing(f"There is no kvdb store at {root}.")
    if not (root / driver.INDEX_NAME).exists() and has_shards(root):
        raise IntegrityError(NO_INDEX.format(root))
    database = Database(root / driver.INDEX_NAME, writer_lock=None)
    lock: FileLock | None = None
    try:
        try:
            lock = share_store(root, create=False)
        except OSError:
            lock = None  # an unwritable folder: nobody can migrate or rebuild it either
        version = database.open()
        if version < driver.latest_version():
            raise StoreUnavailable(OLD_SCHEMA.format(root, version))
        limit = _limit(database, root, Options())
    except BaseException:
        database.close()
        if lock is not None:
            lock.release()
        raise
    store = Store(
        root,
        database,
        limit,
        ShardReader(root),
        FileSystem(),
        environment,
        damage=DamageDesk(database, environment, None),
        spreader=Spreader(options.read_workers),
        ram=RamTier(options.ram),
        read_ahead=options.read_ahead,
        locks=() if lock is None else (lock,),
        durability="process",
    )
    if options.remotes:
        _attach_remotes(store, None)
    return store


def _attach_remotes(store: Store, committer: Committer | None) -> None:
    """Use the remotes that the store knows; none of them is opened now."""
    from kvdb.remotes.configs import load_specs
    from kvdb.remotes.tier import attach

    with store.database.read() as connection:
        specs = load_specs(connection)
    if specs:
        store.remotes = attach(store, specs)
        if committer is not None:
            committer.announce = store.remotes.stored


def _prepare_folder(fs: FileSystem, root: Path, create: bool) -> None:
    if root.exists() and not root.is_dir():
        raise NotAStore(f"{root} is a file, not a kvdb store.")
    known = (root / driver.INDEX_NAME).exists() or (root / "shards").is_dir()
    if not known:
        if not create:
            raise StoreMissing(f"There is no kvdb store at {root}.")
        if root.is_dir() and any(not _is_ours(entry.name) for entry in root.iterdir()):
            raise NotAStore(f"{root} is a folder with other files in it, not a kvdb store.")
        volume = volume_bytes(next(folder for folder in (root, *root.parents) if folder.is_dir()))
        if volume[0] < MIN_MAX_BYTES:
            raise OutOfSpace(
                f"The volume of {root} has {volume[0] >> 20} MiB; a store needs one of at least "
                f"{MIN_MAX_BYTES >> 20} MiB."
            )
    # Durably, with every folder above that is new: a store whose own name is lost is all lost.
    for folder in (*reversed(root.parents), root, *(root / name for name in FOLDERS)):
        if not folder.is_dir():
            fs.make_directory(folder)


def _is_ours(name: str) -> bool:
    """True for names that racing first openers make."""
    return name in OUR_NAMES or name.startswith(("index.", "processes"))


def share_store(root: Path, *, create: bool = True) -> FileLock:
    """Hold ``store.lock`` shared. Raises StoreLocked while another process has it exclusively, and
    OSError where it cannot be opened, or without ``create`` is not there."""
    return _lock_store(root, shared=True, create=create, wait=True)


def claim_store(root: Path, *, wait: bool = False) -> FileLock:
    """Hold ``store.lock`` exclusively; to be taken before any shared hold of this process.

    Raises StoreLocked while any other process, or another Store object, uses the store; with
    ``wait`` only if it does so for long.
    """
    return _lock_store(root, shared=False, create=True, wait=wait)


def _lock_store(root: Path, *, shared: bool, create: bool, wait: bool) -> FileLock:
    lock = FileLock(root / "store.lock")
    if lock.acquire(shared=shared, blocking=False, create=create):
        return lock
    # flock has no time-out: a helper thread waits for it, fairly queued, and gives it up if late.
    turn = threading.Condition()
    given_up = False

    def queue() -> None:
        lock.acquire(shared=shared)
        with turn:
            if given_up:
                lock.release()
            turn.notify_all()

    if wait:
        with turn:
            threading.Thread(target=queue, name="kvdb-store-lock", daemon=True).start()
            if turn.wait_for(lambda: lock.held, LOCK_WAIT_SECONDS):
                return lock
            given_up = True
    raise StoreLocked(
        f"The store at {root} is "
        + ("being migrated or rebuilt" if shared else "in use by another process")
        + "; try again when that is done."
    )


def has_shards(root: Path) -> bool:
    """True when any shard file lies under ``shards/``; looks no further than the first."""
    shards = root / "shards"
    return shards.is_dir() and any(
        file.suffix == ".safetensors"
        for folder in shards.iterdir()
        if folder.is_dir()
        for file in folder.iterdir()
    )


def _create(database: Database, writer_lock: WriterLock, root: Path) -> None:
    with writer_lock.hold():
        # Racing first openers queue here; the losers find the schema made.
        fresh = not database.path.exists()
        if fresh and has_shards(root):
            raise IntegrityError(NO_INDEX.format(root))
        version = database.open()
        if version == 0:
            if has_shards(root):  # an index cut to nothing
                raise IntegrityError(NO_INDEX.format(root))
            database.migrate()
            version = driver.latest_version()
    if version < driver.latest_version():
        raise _OldSchema(OLD_SCHEMA.format(root, version))


def _limit(database: Database, root: Path, options: Options) -> Limit:
    """The limits given now, else the remembered ones, else the defaults. Given ones are kept, as is
    how much history to keep."""
    with database.read() as connection:
        settings = dict(connection.execute("SELECT key, value FROM settings").fetchall())
    given = {key: getattr(options, key) for key in REMEMBERED}
    if any(value is not None and not 0 <= value < 1 << 63 for value in given.values()):
        raise UsageError("Sizes and numbers of rows are whole numbers from 0 on, below 2^63.")
    changed = {
        key: str(value)
        for key, value in given.items()
        if value is not None and settings.get(key) != str(value)
    }
    missing = {k: v for k, v in DEFAULT_SETTINGS.items() if k not in settings}
    settings.update(changed)
    try:
        limit = Limit(
            root,
            int(settings.get("max_bytes", default_max_bytes(root))),
            int(settings.get("min_free_bytes", default_min_free_bytes(root))),
        )
    except ValueError as error:
        raise IntegrityError(f"A stored limit is not a number: {error}.") from error
    if (changed or missing) and not database.read_only:
        with database.write() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO settings (key, value) VALUES (?, ?)",
                list({**missing, **changed}.items()),
            )
    return limit


def migrate_store(path: str | os.PathLike[str]) -> list[str]:
    """Bring an old store's schema up to date, alone on the store. Returns the migrations applied.

    Raises StoreMissing, NotAStore, StoreTooNew, StoreLocked.
    """
    root = Path(path).absolute()
    with usable(root):
        return _migrate(root)


def _migrate(root: Path, *, wait: bool = False) -> list[str]:
    if root.is_file():
        raise NotAStore(f"{root} is a file, not a kvdb store.")
    if not (root / driver.INDEX_NAME).exists():
        raise StoreMissing(f"There is no kvdb store at {root}.")
    lock = claim_store(root, wait=wait)
    try:
        writer_lock = WriterLock(root / "writer.lock")
        database = Database(root / driver.INDEX_NAME, writer_lock=writer_lock)
        try:
            with writer_lock.hold():
                version = database.open()
                if version == driver.latest_version():
                    return []
                if version:
                    write_backup(database, FileSystem(), root, Environment().new_uuid())
                return database.migrate()
        finally:
            database.close()
            writer_lock.close()
    finally:
        lock.release()
