"""index.backup: what shards cannot give back (names, history, settings), kept beside the index."""

from __future__ import annotations

import os
from pathlib import Path

from kvdb.clock import Environment
from kvdb.driver import INDEX_NAME, Database
from kvdb.durable import FileSystem
from kvdb.limit import Limit

BACKUP_NAME = "index.backup"
MAX_AGE_SECONDS = 24 * 3600.0


def refresh_backup(
    database: Database, limit: Limit, fs: FileSystem, environment: Environment, *, age: float
) -> bool:
    """Renew the backup when it is missing or older than ``age`` seconds, and room allows.

    Raises OSError or KvdbError when it cannot be written; the old backup then stays.
    """
    target = limit.root / BACKUP_NAME
    now = environment.now_us() / 1_000_000
    if target.exists() and 0 <= now - target.stat().st_mtime < age:
        return False
    size = (limit.root / INDEX_NAME).stat().st_size
    with database.read() as connection:
        if limit.used(connection) + size > limit.max_bytes or not limit.disk_allows(size):
            return False
    write_backup(database, fs, limit.root, environment.new_uuid())
    return True


def write_backup(database: Database, fs: FileSystem, root: Path, new_uuid: str) -> None:
    """Copy the index consistently and give it the backup's name durably."""
    temp = root / f"{BACKUP_NAME}.new.{new_uuid}"  # what a crash leaves, verify sweeps
    try:
        database.backup_to(temp)
        fd = os.open(temp, os.O_RDWR | os.O_CLOEXEC)
        try:
            fs.sync(fd)
        finally:
            os.close(fd)
        fs.rename(temp, root / BACKUP_NAME)
        fs.sync_directory(root)
    finally:
        fs.unlink(temp)
