"""The only module that imports SQLite: open, version gate, pragmas, transactions, migrations.

One SQLite library per process may touch a store: two of them drop each other's locks. The choice
is that of sqlite-utils, which prefers pysqlite3 where it is installed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

try:
    import pysqlite3.dbapi2 as sqlite3
except ImportError:  # no wheel for this platform
    import sqlite3

__all__ = ["Connection", "Database", "connect", "immediate", "sqlite3"]

from kvdb.errors import (
    IntegrityError,
    KvdbError,
    NotAStore,
    OutOfSpace,
    StoreClosed,
    StoreLocked,
    StoreMissing,
    StoreReadOnly,
    StoreTooNew,
    StoreUnavailable,
)
from kvdb.locks import WriterLock

Connection = Any  # pysqlite3 ships no types
APPLICATION_ID = 0x6B766462  # "kvdb"
INDEX_NAME = "index.sqlite"
SQLITE_VERSION: str = sqlite3.sqlite_version
BUSY_TIMEOUT_SECONDS = 10.0
# SQLite quotes a damaged schema in its message, and the binding then fails to decode it.
SQLITE_ERRORS: tuple[type[Exception], ...] = (sqlite3.Error, UnicodeDecodeError)
IDLE_READERS = 8
# What a WAL that grew beyond it is cut to when it starts anew.
WAL_SIZE_LIMIT = 4 << 20
# From this size on every writer tries to start the WAL anew, waiting this long for short readers.
WAL_RESTART_BYTES = 2 << 20
WAL_WAIT_MS = 50


def has_wal_reset_bug(version: str = SQLITE_VERSION) -> bool:
    """True for SQLite versions whose WAL can be corrupted by concurrent checkpoints
    (sqlite.org/wal.html#walresetbug): 3.7.0 to 3.51.2, but for 3.44.6 and 3.50.7; and 3.52.0."""
    number = tuple(int(piece) for piece in version.split("."))
    if number < (3, 7, 0):
        return False
    if number >= (3, 51, 3):
        return number[:3] == (3, 52, 0)
    patched = {(3, 44): 6, (3, 50): 7}
    return number[2] < patched.get((number[0], number[1]), 1 << 30)


def migration_files() -> list[tuple[str, str]]:
    """``(name, SQL)`` of every migration in order, from the wheel or the source tree."""
    packaged = resources.files("kvdb") / "_migrations"
    folder = packaged if packaged.is_dir() else Path(__file__).parent.parent / "migrations"
    files = [entry for entry in folder.iterdir() if entry.name.endswith(".sql")]
    return [
        (entry.name.removesuffix(".sql"), entry.read_text("utf-8"))
        for entry in sorted(files, key=lambda entry: entry.name)
    ]


def latest_version() -> int:
    """The schema version that this program writes: the number of its last migration."""
    return int(migration_files()[-1][0].split("_")[0])


def connect(path: Path, *, read_only: bool = False, immutable: bool = False) -> Connection:
    """A bare connection in autocommit mode. Raises StoreUnavailable when SQLite cannot open it."""
    mode = "ro" if read_only or immutable else "rwc"
    uri = f"{path.absolute().as_uri()}?mode={mode}" + ("&immutable=1" if immutable else "")
    try:
        connection = sqlite3.connect(
            uri,
            uri=True,
            timeout=BUSY_TIMEOUT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        connection.execute("PRAGMA schema_version")
    except SQLITE_ERRORS as error:
        raise translate(error, path) from error
    return connection


def translate(error: Exception, path: Path) -> KvdbError:
    """The typed error for a SQLite error met at ``path``: never SQLite's own."""
    name = getattr(error, "sqlite_errorname", "") or ""
    text = "malformed" if isinstance(error, UnicodeDecodeError) else str(error)
    if name.startswith("SQLITE_NOTADB") or "file is not a database" in text:
        return NotAStore(f"{path} is not a kvdb index; choose another folder or run kvdb rebuild.")
    if name.startswith("SQLITE_CORRUPT") or "malformed" in text:
        return IntegrityError(f"The index {path} is damaged ({text}); run kvdb rebuild.")
    if name.startswith("SQLITE_FULL") or "disk is full" in text:
        return OutOfSpace(f"The disk under {path.parent} is full; free some space.")
    if name.startswith("SQLITE_READONLY") or "readonly" in text:
        return StoreReadOnly(f"{path} cannot be written; check the folder's permissions.")
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_PERM", "SQLITE_AUTH")) or (
        "unable to open" in text or "disk I/O error" in text
    ):
        return StoreUnavailable(f"The index {path} cannot be used ({text}).")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) or "locked" in text:
        return StoreLocked(f"Another program keeps {path} locked; end its transaction.")
    return IntegrityError(f"The index {path} refused a statement ({text}); run kvdb verify.")


def schema_state(connection: Connection, path: Path) -> int:
    """The store's schema version; 0 for an empty file. Raises NotAStore or StoreTooNew."""
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application == 0 and version == 0:
            tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            if tables == 0:
                return 0
    except SQLITE_ERRORS as error:
        raise translate(error, path) from error
    if application != APPLICATION_ID:
        raise NotAStore(f"{path} is a SQLite file of another program, not a kvdb index.")
    if version > latest_version():
        raise StoreTooNew(
            f"The store at {path.parent} has schema {version}, this kvdb knows {latest_version()}; "
            "upgrade kvdb."
        )
    return int(version)


def migration_digests() -> list[tuple[str, str]]:
    """``(name, SHA-256)`` of every migration file."""
    return [(name, hashlib.sha256(text.encode()).hexdigest()) for name, text in migration_files()]


def check_migrations(connection: Connection, path: Path) -> None:
    """Raise IntegrityError when the store was made by other text under the same version numbers,
    as between two development versions."""
    try:
        applied = connection.execute("SELECT name, sha256 FROM migration_files").fetchall()
    except SQLITE_ERRORS as error:
        raise translate(error, path) from error
    if not set(applied) <= set(migration_digests()):
        raise IntegrityError(
            f"The store at {path.parent} was made by another development version of kvdb; run "
            "kvdb rebuild, or delete it."
        )


def statements(script: str) -> Iterator[str]:
    """The statements of a script: inside a transaction it cannot be run as one. (sqlite-utils asks
    whether one is complete after each character, which takes ten times as long as running it.)"""
    *ended, rest = script.split(";")
    text = ""
    for piece in ended:
        text += piece + ";"
        if sqlite3.complete_statement(text):
            yield text.strip()
            text = ""
    if (text + rest).strip():
        yield (text + rest).strip()


def apply_migrations(connection: Connection) -> list[str]:
    """Bring the schema up to date in one transaction; the caller holds ``writer.lock`` (fresh
    store) or ``store.lock`` exclusively (old store). Returns the names applied."""
    from sqlite_utils import Database as SqliteUtils  # 0.2 s of import, needed only here
    from sqlite_utils import Migrations

    files = migration_files()
    migrations = Migrations("kvdb")
    for name, text in files:
        # The default argument binds this file's text, not the loop's last.
        def apply(db: Any, text: str = text) -> None:
            for statement in statements(text):
                db.conn.execute(statement)

        migrations(name=name)(apply)
    database = SqliteUtils(connection, execute_plugins=False, recursive_triggers=False)
    with immediate(connection):
        if connection.execute("PRAGMA user_version").fetchone()[0] >= latest_version():
            return []
        before = {applied.name for applied in migrations.applied(database)}
        migrations.apply(database)
        connection.execute(
            "CREATE TABLE IF NOT EXISTS migration_files "
            "(name TEXT PRIMARY KEY, sha256 TEXT NOT NULL) STRICT, WITHOUT ROWID"
        )
        connection.executemany(
            "INSERT OR IGNORE INTO migration_files (name, sha256) VALUES (?, ?)",
            migration_digests(),
        )
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {latest_version()}")
    return [name for name, _ in files if name not in before]


@contextmanager
def immediate(connection: Connection) -> Iterator[Connection]:
    """A write transaction that takes its lock at once: a deferred one fails when it has to."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class Database:
    """The index file of one open store: one write connection, one read connection per thread.

    ``writer_lock`` is None for a read-only store. Closing is idempotent.
    """

    def __init__(
        self, path: Path, *, writer_lock: WriterLock | None, durability: str = "process"
    ) -> None:
        self.path = path
        self._writer_lock = writer_lock
        self._durability = durability
        self._local = threading.local()
        self._idle: list[Connection] = []
        self._in_use = 0
        self._readers = threading.Condition()
        self._closed = False
        self._retry_wal_at = 0
        self._pid = os.getpid()
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._writer: Connection | None = None

    @property
    def read_only(self) -> bool:
        return self._writer_lock is None

    def open(self) -> int:
        """Open or create the file and set its pragmas. Returns the schema version found (0 when
        just created). Raises StoreMissing, NotAStore, StoreTooNew, StoreUnavailable."""
        if self.read_only:
            if not self.path.exists():
                raise StoreMissing(f"There is no kvdb store at {self.path.parent}.")
            with self.read() as connection:
                version = schema_state(connection, self.path)
                if version == 0:
                    raise StoreMissing(f"There is no kvdb store at {self.path.parent}.")
                check_migrations(connection, self.path)
            return version
        connection = connect(self.path)
        try:
            version = schema_state(connection, self.path)
            if version == 0:
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
                connection.execute("PRAGMA journal_mode = WAL")
            else:
                check_migrations(connection, self.path)
            self._configure(connection)
        except SQLITE_ERRORS as error:
            connection.close()
            raise translate(error, self.path) from error
        except BaseException:
            connection.close()
            raise
        self._writer = connection
        return version

    def _configure(self, connection: Connection) -> None:
        full = self._durability == "power"
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
        connection.execute(f"PRAGMA fullfsync = {int(full)}")
        connection.execute(f"PRAGMA checkpoint_fullfsync = {int(full)}")
        connection.execute("PRAGMA cache_size = -16000")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_SIZE_LIMIT}")
        # Commits happen under writer.lock, so automatic checkpoints do too. On a library with the
        # WAL-reset bug even that is left to maintenance.
        connection.execute(f"PRAGMA wal_autocheckpoint = {0 if has_wal_reset_bug() else 1000}")

    def migrate(self) -> list[str]:
        """Apply pending migrations (see :func:`apply_migrations`)."""
        connection = self._require_writer()[0]
        try:
            # Durable before the first shard is: else a power cut can leave shards without a schema.
            connection.execute("PRAGMA synchronous = FULL")
            applied = apply_migrations(connection)
            self._configure(connection)
        except SQLITE_ERRORS as error:
            raise translate(error, self.path) from error
        return applied

    def _open_reader(self) -> Connection:
        if not self.read_only:
            connection = connect(self.path, read_only=True)
        else:
            connection = self._open_unwritable()
        try:
            connection.execute("PRAGMA query_only = ON")
            connection.execute("PRAGMA cache_size = -16000")
            connection.execute("PRAGMA temp_store = MEMORY")
        except SQLITE_ERRORS as error:
            connection.close()
            raise translate(error, self.path) from error
        return connection

    def _open_unwritable(self) -> Connection:
        """A folder that cannot be written: a clean index opens immutable; one with a WAL is
        copied with it to a temp folder, where SQLite can make its shared-memory file."""
        try:
            return connect(self.path, read_only=True)
        except (StoreUnavailable, StoreReadOnly):
            wal = self.path.with_name(self.path.name + "-wal")
            if not wal.exists() or wal.stat().st_size == 0:
                return connect(self.path, immutable=True)
        with self._readers:
            if self._copy is None:
                self._copy = tempfile.TemporaryDirectory(prefix="kvdb-index-")
                for source in (self.path, wal):
                    target = Path(self._copy.name) / source.name
                    target.write_bytes(source.read_bytes())
            return connect(Path(self._copy.name) / self.path.name)

    def sandboxed(self) -> Connection:
        """A read connection of its own, for ad-hoc SQL; the caller closes it."""
        self._check_open()
        return self._open_reader()

    def _check_open(self) -> None:
        if self._closed or self._pid != os.getpid():
            raise StoreClosed("This store object is closed, or belongs to another process.")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent, short read transaction; a nested one is part of the outer."""
        outer = getattr(self._local, "connection", None)
        if outer is not None:
            yield outer
            return
        connection = self._take()
        self._local.connection = connection
        try:
            connection.execute("BEGIN")
            yield connection
        except SQLITE_ERRORS as error:
            raise translate(error, self.path) from error
        finally:
            self._local.connection = None
            self._give_back(connection)

    def _take(self) -> Connection:
        with self._readers:
            self._check_open()
            self._in_use += 1
            if self._idle:
                return self._idle.pop()
        try:
            return self._open_reader()
        except BaseException:
            with self._readers:
                self._in_use -= 1
                self._readers.notify_all()
            raise

    def _give_back(self, connection: Connection) -> None:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        with self._readers:
            self._in_use -= 1
            if len(self._idle) < IDLE_READERS and not self._closed:
                self._idle.append(connection)
            else:
                connection.close()
            self._readers.notify_all()

    @contextmanager
    def write(self, *, durable: bool = False) -> Iterator[Connection]:
        """A write transaction under ``writer.lock``; keep it under 100 ms.

        ``durable`` syncs the WAL at its commit, whatever the store's durability: required before
        a file is unlinked whose rows it removes.
        """
        connection, writer_lock = self._require_writer()
        with writer_lock.hold():
            if self._closed:
                raise StoreClosed("This store object is closed.")
            raised = durable and self._durability != "power"
            try:
                if raised:
                    connection.execute("PRAGMA synchronous = FULL")
                with immediate(connection):
                    yield connection
                self._restart_wal(connection)
            except SQLITE_ERRORS as error:
                raise translate(error, self.path) from error
            finally:
                if raised:
                    connection.execute("PRAGMA synchronous = NORMAL")

    def _restart_wal(self, connection: Connection) -> None:
        """Cut a WAL that grew: with many readers some always looks at it, and an automatic
        checkpoint, which waits for none, would never let it start anew."""
        size = self.wal_bytes()
        if size < max(WAL_RESTART_BYTES, self._retry_wal_at):
            return
        connection.execute(f"PRAGMA busy_timeout = {WAL_WAIT_MS}")
        try:
            (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_SECONDS * 1000)}")
        # A reader that stays is not waited for again until there is reason to.
        self._retry_wal_at = size + WAL_RESTART_BYTES // 2 if busy else 0

    def wal_bytes(self) -> int:
        """Size of the WAL's file."""
        try:
            return self.path.with_name(self.path.name + "-wal").stat().st_size
        except OSError:
            return 0

    def _require_writer(self) -> tuple[Connection, WriterLock]:
        if self._pid != os.getpid():
            raise StoreClosed("This store object belongs to another process.")
        if self._writer is None or self._writer_lock is None:
            if self.read_only and not self._closed:
                raise StoreReadOnly(f"The store at {self.path.parent} is open for reading only.")
            raise StoreClosed("This store object is closed.")
        return self._writer, self._writer_lock

    def checkpoint(self, *, wait: bool = True) -> bool:
        """Move the WAL into the file; True when all of it went, so that it starts anew.

        With ``wait`` it also waits for readers and cuts the WAL to nothing.
        """
        connection, writer_lock = self._require_writer()
        mode = "TRUNCATE" if wait else "PASSIVE"
        with writer_lock.hold():
            try:
                busy, frames, moved = connection.execute(
                    f"PRAGMA wal_checkpoint({mode})"
                ).fetchone()
            except SQLITE_ERRORS as error:
                raise translate(error, self.path) from error
        return not busy and frames == moved

    def backup_to(self, target: Path) -> None:
        """A consistent copy of the index at ``target``, through SQLite's backup interface."""
        copy = connect(target)
        try:
            copy.execute("PRAGMA journal_mode = DELETE")
            with self.read() as connection:
                connection.backup(copy)
        except SQLITE_ERRORS as error:
            raise translate(error, self.path) from error
        finally:
            copy.close()

    def memory_copy(self) -> Connection:
        """A writable copy of the index in memory, for questions of the kind "what if"; the caller
        closes it."""
        copy = sqlite3.connect(":memory:", isolation_level=None)
        with self.read() as connection:
            connection.backup(copy)
        return copy

    def close(self) -> None:
        """Wait for transactions under way, then close. Idempotent."""
        with self._readers:
            if self._closed:
                return
            self._closed = True
            if self._pid != os.getpid():
                return  # a forked child must not touch its parent's connections
            # A connection closed under a running statement takes the process down.
            self._readers.wait_for(lambda: self._in_use == 0)
            for connection in self._idle:
                connection.close()
            self._idle.clear()
        if self._writer is not None and self._writer_lock is not None:
            with self._writer_lock.hold():
                # Last connection out checkpoints and deletes the WAL.
                self._writer.close()
                self._writer = None
        if self._copy is not None:
            self._copy.cleanup()
