"""Rows of ``sequences``: who holds which block. Runs inside the caller's write transaction."""

from __future__ import annotations

from kvdb import index
from kvdb.driver import Connection

INSERT_SEQUENCE = (
    "INSERT INTO sequences (name, namespace_id, tip_id, process_id, tenant, expires_at, "
    "created_at) VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING id"
)
SEQUENCE_TIP = "SELECT tip_id FROM sequences WHERE id = ?"
MOVE_SEQUENCE = "UPDATE sequences SET tip_id = ? WHERE id = ?"
# The block of a chain at a depth, by its tip.
ANCESTOR_AT = """
WITH RECURSIVE chain (id, parent_id, depth) AS (
    SELECT id, parent_id, depth FROM blocks WHERE id = ?1
    UNION ALL
    SELECT b.id, b.parent_id, b.depth FROM chain JOIN blocks AS b ON b.id = chain.parent_id
    WHERE chain.depth > ?2
)
SELECT parent_id FROM chain WHERE depth = ?2
"""
GROWN_TOKENS = """
WITH RECURSIVE chain (id, parent_id, depth) AS (
    SELECT id, parent_id, depth FROM blocks WHERE id = ?1
    UNION ALL
    SELECT b.id, b.parent_id, b.depth FROM chain JOIN blocks AS b ON b.id = chain.parent_id
    WHERE chain.depth > ?2
)
SELECT (SELECT tokens FROM block_tokens WHERE block_id = chain.id),
    (SELECT tokens FROM block_tokens WHERE block_id = ?3)
FROM chain WHERE depth = ?2
"""
TAIL_OF = (
    "SELECT b.refs, b.depth, b.parent_id, b.token_count < n.block_tokens FROM blocks AS b "
    "JOIN namespaces AS n ON n.id = b.namespace_id WHERE b.id = ?"
)
EXPIRED_SEQUENCES = "SELECT id, name, tip_id FROM sequences WHERE expires_at <= ? LIMIT 100"
DELETE_SEQUENCE = "DELETE FROM sequences WHERE id = ? RETURNING tip_id"


def move_sequence(connection: Connection, sequence_id: int, tip_id: int) -> None:
    """Move a sequence's tip to a held block. Growing a tail that others share copies it: counted
    in ``cow_copies``."""
    row = connection.execute(SEQUENCE_TIP, (sequence_id,)).fetchone()
    if row is None or row[0] == tip_id:
        return
    old = row[0]
    index.add_hold(connection, tip_id)
    connection.execute(MOVE_SEQUENCE, (tip_id, sequence_id))
    if old is None:
        return
    refs, depth, parent_id, is_tail = connection.execute(TAIL_OF, (old,)).fetchone()
    grown = False
    if is_tail:
        ancestor = connection.execute(ANCESTOR_AT, (tip_id, depth)).fetchone()
        grown = ancestor is not None and ancestor[0] == parent_id
    if grown and refs > 1:
        index.bump(connection, "cow_copies")
    index.drop_hold(connection, old)
    if grown and refs == 1 and _contains(connection, tip_id, depth, old):
        connection.execute(index.SUPERSEDE, (old,))


def _contains(connection: Connection, tip_id: int, depth: int, tail_id: int) -> bool:
    """True when the block at ``depth`` of a chain begins with a tail's tokens."""
    row = connection.execute(GROWN_TOKENS, (tip_id, depth, tail_id)).fetchone()
    if row is None or None in row or not row[1]:
        return False
    return bytes(row[0]).startswith(bytes(row[1]))


def add_sequence(
    connection: Connection,
    *,
    name: str | None,
    namespace_id: int,
    tip_id: int | None,
    process_id: int | None,
    tenant: str,
    expires_at: int | None,
    now: int,
) -> int:
    """A new sequence holding ``tip_id``; one row, no bytes."""
    (sequence_id,) = connection.execute(
        INSERT_SEQUENCE, (name, namespace_id, tip_id, process_id, tenant, expires_at, now)
    ).fetchone()
    if tip_id is not None:
        index.add_hold(connection, tip_id)
    return int(sequence_id)


def drop_sequence(connection: Connection, sequence_id: int) -> None:
    """Release a sequence; quiet when it is gone."""
    row = connection.execute(DELETE_SEQUENCE, (sequence_id,)).fetchone()
    if row is not None:
        index.drop_hold(connection, row[0])


def drop_expired(connection: Connection, now: int) -> None:
    """Release sequences whose time is over, some at a time. History keeps that the hold went, by
    name: the block itself stays until it is evicted."""
    for sequence_id, name, tip_id in connection.execute(EXPIRED_SEQUENCES, (now,)).fetchall():
        if tip_id is not None and name is not None:
            connection.execute(index.INSERT_EVICTION, (now, "hold", "expired", 0, name, tip_id))
        drop_sequence(connection, sequence_id)
