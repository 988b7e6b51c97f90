"""Rows of ``snapshots``: where state came from and went to."""

from __future__ import annotations

from kvdb.driver import Connection

INSERT_IMPORT = (
    "INSERT INTO snapshots (direction, digest, name, started_at, blocks, nbytes) "
    "VALUES ('import', ?, ?, ?, ?, ?) RETURNING id"
)
UPDATE_IMPORT = "UPDATE snapshots SET new_blocks = ?, ended_at = ? WHERE id = ?"
INSERT_EXPORT = (
    "INSERT INTO snapshots (direction, digest, name, started_at, ended_at, blocks, nbytes) "
    "VALUES ('export', ?, ?, ?, ?, ?, ?)"
)
# The latest export whose digest begins so.
EXPORTED_AT = (
    "SELECT started_at FROM snapshots WHERE direction = 'export' "
    "AND substr(digest, 1, length(?1)) = ?1 ORDER BY id DESC LIMIT 1"
)


def insert_import(
    connection: Connection, name: str, digest: str, blocks: int, nbytes: int, started: int
) -> int:
    """A row for an import that is verified and about to become visible; its id."""
    (id_,) = connection.execute(INSERT_IMPORT, (digest, name, started, blocks, nbytes)).fetchone()
    return int(id_)


def update_import(connection: Connection, snapshot_id: int, stored: int, now: int) -> None:
    connection.execute(UPDATE_IMPORT, (stored, now, snapshot_id))


def insert_export(
    connection: Connection,
    name: str,
    digest: str,
    blocks: int,
    nbytes: int,
    started: int,
    ended: int,
) -> None:
    connection.execute(INSERT_EXPORT, (digest, name, started, ended, blocks, nbytes))


def exported_at(connection: Connection, digest: str) -> int | None:
    """When the export of this digest (or its start) began, in Unix µs."""
    row = connection.execute(EXPORTED_AT, (digest,)).fetchone()
    return None if row is None else int(row[0])
