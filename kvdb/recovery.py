"""Settles what dead processes left: shards being written, dead shards, running requests.

Looks only at rows, never at the payload folder, so opening costs the same whatever the store's
size. Whoever opens the store does it; so may any process later.
"""

from __future__ import annotations

from pathlib import Path

from kvdb import holding, index
from kvdb.driver import Connection, Database
from kvdb.durable import FileSystem
from kvdb.locks import FileLock, is_dead
from kvdb.shards import shard_path, temp_path

DEAD_CANDIDATES = "SELECT id, uuid FROM processes WHERE id <> ?"
UNFINISHED = "SELECT id, uuid FROM shards WHERE state = 'writing' AND process_id = ?"
RUNNING = "SELECT id FROM sequences WHERE process_id = ?"
FORGET_PROCESS = "DELETE FROM processes WHERE id = ?"
RELEASES_PER_TRANSACTION = 100


def process_lock_path(root: Path, uuid: str) -> Path:
    return root / "processes" / f"{uuid}.lock"


def register(database: Database, uuid: str, pid: int, program: str, now: int) -> int:
    """Insert this process's row; its lock file must be held already, else the row would look dead.
    Returns the row's id."""
    with database.write() as connection:
        return int(
            connection.execute(
                "INSERT INTO processes (uuid, pid, program, started_at) VALUES (?, ?, ?, ?) "
                "RETURNING id",
                (uuid, pid, program, now),
            ).fetchone()[0]
        )


def settle(database: Database, fs: FileSystem, root: Path, own_id: int) -> int:
    """Remove what dead processes were writing and release what they held.

    Returns how many processes were settled. Unfinished shards are counted in ``leftovers_swept``.
    """
    settled = 0
    with database.read() as connection:
        processes = connection.execute(DEAD_CANDIDATES, (own_id,)).fetchall()
    for process_id, uuid in processes:
        lock = process_lock_path(root, uuid)
        if is_dead(lock):
            _settle_process(database, fs, root, process_id)
            fs.unlink(lock)
            settled += 1
    return settled


def _settle_process(database: Database, fs: FileSystem, root: Path, process_id: int) -> None:
    with database.read() as connection:
        unfinished = connection.execute(UNFINISHED, (process_id,)).fetchall()
    # Files first: a row without files is found again, a file without a row only by verify.
    for _, uuid in unfinished:
        fs.unlink(temp_path(root, uuid))
        fs.unlink(shard_path(root, uuid))
    while True:
        with database.write() as connection:
            if _release_some(connection, process_id):
                continue
            connection.executemany(index.DELETE_WRITING, [(id_,) for id_, _ in unfinished])
            if unfinished:
                index.bump(connection, "leftovers_swept", len(unfinished))
            connection.execute(FORGET_PROCESS, (process_id,))
        return


def _release_some(connection: Connection, process_id: int) -> bool:
    """Release a batch of a process's running requests; True while there may be more."""
    rows = connection.execute(RUNNING, (process_id,)).fetchmany(RELEASES_PER_TRANSACTION)
    for (sequence_id,) in rows:
        holding.drop_sequence(connection, sequence_id)
    return len(rows) == RELEASES_PER_TRANSACTION


def deregister(database: Database, lock: FileLock, process_id: int) -> None:
    """The clean end of a process: its requests are released and its row goes. Whatever happens,
    its lock is free afterwards, so that others settle the rest."""
    try:
        while True:
            with database.write() as connection:
                if _release_some(connection, process_id):
                    continue
                # A shard that could not be removed keeps its owner's row: another open settles it.
                if connection.execute(UNFINISHED, (process_id,)).fetchone() is None:
                    connection.execute(FORGET_PROCESS, (process_id,))
                    lock.path.unlink(missing_ok=True)
            return
    finally:
        lock.release()
