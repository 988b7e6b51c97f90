"""Every statement on the index: named constants and the functions that run them.

Each function takes a connection inside a transaction (``Database.read`` or ``Database.write``).
*Held* = live, or refs > 0; a held block's parent is held, since refs counts held children.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvdb.driver import Connection
from kvdb.errors import IntegrityError, UsageError
from kvdb.identity import ModelIdentity, Tokens
from kvdb.layout import Layout
from kvdb.reader import Location
from kvdb.shards import NamespaceRecord

MAX_SIBLINGS = 64

NEXT_TICK = (
    "INSERT INTO counters (name, value) VALUES ('tick', 1) "
    "ON CONFLICT (name) DO UPDATE SET value = value + 1 RETURNING value"
)
BUMP_COUNTER = (
    "INSERT INTO counters (name, value) VALUES (?1, ?2) "
    "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"
)
# What a counter is worth that is missing; verify --repair writes it again.
NO_COUNTERS = dict.fromkeys(
    (
        "tick",
        "shard_bytes",
        "live_cold",
        "live_hot",
        "evicted_cold",
        "evicted_hot",
        "cow_copies",
        "blocks_dropped",
        "blocks_too_large",
        "leftovers_swept",
    ),
    0,
) | {"age_ratio": 2 << 20}
ALL_COUNTERS = "SELECT name, value FROM counters"

FIND_BLOCK = (
    "SELECT id, parent_id, namespace_id, depth, token_count, refs, state, queue, exact, build_id, "
    "last_access FROM blocks WHERE hash = ?"
)
FIND_HELD = "SELECT id FROM blocks WHERE hash = ? AND (state = 'live' OR refs > 0)"
# From the tip to the root: (id, token_count, live, exact, build_id, one part or nulls). Only what
# a plan needs: the rest of a location is read with the bytes, which halves the time of a match.
CHAIN_PARTS = """
WITH RECURSIVE chain (id, parent_id, token_count, live, exact, build_id) AS (
    SELECT id, parent_id, token_count, state = 'live', exact, build_id FROM blocks WHERE id = ?
    UNION ALL
    SELECT b.id, b.parent_id, b.token_count, b.state = 'live', b.exact, b.build_id
    FROM chain JOIN blocks AS b ON b.id = chain.parent_id
)
SELECT c.id, c.token_count, c.live, c.exact, c.build_id, p.part, p.shard_id, p.offset
FROM chain AS c LEFT JOIN parts AS p ON p.block_id = c.id
"""
LOCATIONS = (
    "SELECT p.block_id, b.hash, p.part, s.uuid, p.offset, p.nbytes, p.raw_nbytes, p.codec, "
    "p.checksum, b.exact, b.build_id FROM parts AS p JOIN blocks AS b ON b.id = p.block_id "
    "JOIN shards AS s ON s.id = p.shard_id "
    "WHERE p.block_id IN (SELECT value FROM json_each(?))"
)
BLOCK_PARTS = "SELECT part, shard_id, offset FROM parts WHERE block_id = ?"
PART_LOCATION = (
    "SELECT s.uuid, p.offset, p.nbytes, p.raw_nbytes, p.codec, p.checksum, b.exact, b.build_id "
    "FROM parts AS p JOIN blocks AS b ON b.id = p.block_id JOIN shards AS s ON s.id = p.shard_id "
    "WHERE p.block_id = ? AND p.part = ?"
)
CHILDREN = (
    "SELECT b.id, b.hash, b.depth, b.token_count, b.exact, b.build_id, t.tokens, t.extra "
    "FROM blocks AS b JOIN block_tokens AS t ON t.block_id = b.id "
    "WHERE b.parent_id = ? AND b.state = 'live' ORDER BY b.id DESC LIMIT ?"
)
ROOTS = (
    "SELECT b.id, b.hash, b.depth, b.token_count, b.exact, b.build_id, t.tokens, t.extra "
    "FROM blocks AS b JOIN block_tokens AS t ON t.block_id = b.id "
    "WHERE b.parent_id IS NULL AND b.namespace_id = ? AND b.state = 'live' "
    "ORDER BY b.id DESC LIMIT ?"
)
# Tails (blocks shorter than a full one) that end in a recurrent state, under some parents.
STATE_TAILS = (
    "SELECT b.id, b.hash, b.depth, b.token_count, b.exact, b.build_id, t.tokens, t.extra "
    "FROM blocks AS b JOIN block_tokens AS t ON t.block_id = b.id "
    "WHERE b.parent_id IN (SELECT value FROM json_each(?1)) AND b.state = 'live' "
    "AND b.token_count < ?2 AND EXISTS "
    "(SELECT 1 FROM parts WHERE block_id = b.id AND part >= 'state:' AND part < 'state;') "
    "ORDER BY b.depth DESC, b.token_count DESC, b.id DESC LIMIT ?3"
)
STATE_ROOTS = STATE_TAILS.replace(
    "b.parent_id IN (SELECT value FROM json_each(?1))",
    "b.parent_id IS NULL AND b.namespace_id = ?1",
)
# Why a block is not there: a part that was thinned out is not why.
LAST_EVICTION = (
    "SELECT reason FROM evictions WHERE block_hash = ? AND reason <> 'replaced' "
    "ORDER BY id DESC LIMIT 1"
)
ANY_CHILD = "SELECT 1 FROM blocks WHERE parent_id = ? LIMIT 1"
ANY_BLOCK = "SELECT 1 FROM blocks LIMIT 1"
INSERT_BLOCK = (
    "INSERT INTO blocks (hash, parent_id, namespace_id, depth, token_count, refs, state, queue, "
    "origin, exact, build_id, created_at, last_access, prev_access) "
    "VALUES (?, ?, ?, ?, ?, 0, 'live', 'cold', ?, ?, ?, ?, ?, ?) RETURNING id"
)
INSERT_TOKENS = "INSERT OR REPLACE INTO block_tokens (block_id, tokens, extra) VALUES (?, ?, ?)"
DELETE_TOKENS = "DELETE FROM block_tokens WHERE block_id = ?"
INSERT_PART = (
    "INSERT INTO parts (block_id, part, shard_id, offset, nbytes, raw_nbytes, codec, checksum) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
DELETE_PARTS = "DELETE FROM parts WHERE block_id = ?"
DELETE_PART = "DELETE FROM parts WHERE block_id = ? AND part = ? RETURNING nbytes"
PARTS_BYTES = "SELECT coalesce(sum(nbytes), 0) FROM parts WHERE block_id = ?"
ADD_REF = "UPDATE blocks SET refs = refs + 1 WHERE id = ?"
DROP_REF = "UPDATE blocks SET refs = max(refs - 1, 0) WHERE id = ? RETURNING refs, state, parent_id"
BLOCK_HOLD = "SELECT refs, state, parent_id FROM blocks WHERE id = ?"
SET_STATE = "UPDATE blocks SET state = ? WHERE id = ?"
INSERT_EVICTION = (
    "INSERT INTO evictions (evicted_at, namespace_id, block_hash, depth, token_count, part, "
    "reason, nbytes, detail) SELECT ?, namespace_id, hash, depth, token_count, ?, ?, ?, ? "
    "FROM blocks WHERE id = ?"
)
# A tail that a longer sibling contains is the first victim: tick 0. Only the newest are looked at.
# One that ends in a recurrent state is more than a copy.
SHORTER_CHILDREN = (
    "SELECT b.id, t.tokens FROM (SELECT id, token_count, state, refs FROM blocks "
    "WHERE parent_id = ? ORDER BY id DESC LIMIT 64) AS b "
    "JOIN block_tokens AS t ON t.block_id = b.id "
    "WHERE b.token_count < ? AND b.state = 'live' AND b.refs = 0 AND NOT EXISTS "
    "(SELECT 1 FROM parts WHERE block_id = b.id AND part >= 'state:' AND part < 'state;')"
)
SHORTER_ROOTS = (
    "SELECT b.id, t.tokens FROM (SELECT id, token_count, state, refs FROM blocks "
    "WHERE parent_id IS NULL AND namespace_id = ? ORDER BY id DESC LIMIT 64) AS b "
    "JOIN block_tokens AS t ON t.block_id = b.id "
    "WHERE b.token_count < ? AND b.state = 'live' AND b.refs = 0 AND NOT EXISTS "
    "(SELECT 1 FROM parts WHERE block_id = b.id AND part >= 'state:' AND part < 'state;')"
)
SUPERSEDE = "UPDATE blocks SET queue = 'cold', last_access = 0, prev_access = 0 WHERE id = ?"

FIND_NAMESPACE = "SELECT id FROM namespaces WHERE fingerprint = ?"
INSERT_NAMESPACE = (
    "INSERT INTO namespaces (fingerprint, model, identity, layout, block_tokens, salt, build, "
    "created_at, used_at, tenant) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id"
)
USE_NAMESPACE = "UPDATE namespaces SET used_at = ?, model = ?, tenant = ? WHERE id = ?"
NAMESPACE_RECORD = (
    "SELECT fingerprint, model, identity, layout, block_tokens, salt, build FROM namespaces "
    "WHERE id = ?"
)
NAMESPACE_BLOCKS = "SELECT live_blocks FROM namespaces WHERE id = ?"

INSERT_SHARD = (
    "INSERT INTO shards (uuid, state, namespace_id, process_id, nbytes, created_at) "
    "VALUES (?, 'writing', ?, ?, ?, ?) RETURNING id"
)
PUBLISH_SHARD = (
    "UPDATE shards SET state = 'live', process_id = NULL, nbytes = ?, part_bytes = ? WHERE id = ?"
)
KILL_EMPTY_SHARDS = (
    "UPDATE shards SET state = 'dead' WHERE id = ? AND live_parts = 0 AND state = 'live' "
    "RETURNING id, uuid, nbytes"
)
DEAD_SHARDS = "SELECT id, uuid, nbytes FROM shards WHERE state = 'dead'"
DELETE_WRITING = "DELETE FROM shards WHERE id = ? AND state = 'writing'"
DELETE_DEAD = "DELETE FROM shards WHERE id = ? AND state = 'dead'"
BLOCK_LAYOUT = (
    "SELECT layout FROM namespaces WHERE id = (SELECT namespace_id FROM blocks WHERE id = ?)"
)
BLOCK_SHARDS = "SELECT DISTINCT shard_id FROM parts WHERE block_id = ?"


class BlockRow(NamedTuple):
    """A row of ``blocks`` as found by hash."""

    id: int
    parent_id: int | None
    namespace_id: int
    depth: int
    token_count: int
    refs: int
    state: str
    queue: str
    exact: int
    build_id: int | None
    last_access: int

    @property
    def held(self) -> bool:
        return self.state == "live" or self.refs > 0


def tokens_from_blob(blob: bytes) -> Tokens:
    """Token ids of ``block_tokens.tokens``."""
    return np.frombuffer(blob[: len(blob) // 4 * 4], dtype="<u4")


def next_tick(connection: Connection) -> int:
    return int(connection.execute(NEXT_TICK).fetchone()[0])


def bump(connection: Connection, counter: str, by: int = 1) -> None:
    connection.execute(BUMP_COUNTER, (counter, by))


def counters(connection: Connection) -> dict[str, int]:
    return {**NO_COUNTERS, **dict(connection.execute(ALL_COUNTERS).fetchall())}


def find_block(connection: Connection, hash_: bytes) -> BlockRow | None:
    row = connection.execute(FIND_BLOCK, (hash_,)).fetchone()
    return None if row is None else BlockRow._make(row)


def deepest_held(connection: Connection, hashes: Sequence[bytes]) -> tuple[int, int | None]:
    """``(count, id of the last)`` of the leading held blocks of a chain.

    Gallops: held is monotone along a chain, so 2·log₂(n) look-ups find the end.
    """

    def held(index: int) -> int | None:
        row = connection.execute(FIND_HELD, (hashes[index],)).fetchone()
        return None if row is None else int(row[0])

    if not hashes:
        return 0, None
    found = held(len(hashes) - 1)
    if found is not None:
        return len(hashes), found
    low, low_id = -1, None
    step, high = 1, len(hashes) - 1
    while low + step < high:
        found = held(low + step)
        if found is None:
            high = low + step
            break
        low, low_id = low + step, found
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        found = held(middle)
        if found is None:
            high = middle
        else:
            low, low_id = middle, found
    return low + 1, low_id


def locations(connection: Connection, block_ids: Sequence[int]) -> dict[tuple[int, str], Location]:
    """Where the parts of some blocks lie now, by (block id, part name)."""
    rows = connection.execute(LOCATIONS, (json.dumps(block_ids),))
    return {(row[0], row[2]): Location._make(row) for row in rows}


def add_hold(connection: Connection, block_id: int) -> None:
    """One more reference on a held block."""
    connection.execute(ADD_REF, (block_id,))


def drop_hold(connection: Connection, block_id: int | None) -> None:
    """One reference less; blocks that are no longer held release their parents in turn."""
    while block_id is not None:
        refs, state, parent_id = connection.execute(DROP_REF, (block_id,)).fetchone()
        if refs > 0 or state == "live":
            return
        connection.execute(DELETE_TOKENS, (block_id,))
        block_id = parent_id


def insert_block(
    connection: Connection,
    *,
    hash_: bytes,
    parent_id: int | None,
    namespace_id: int,
    depth: int,
    token_count: int,
    origin: str,
    exact: bool,
    build_id: int | None,
    now: int,
    tick: int,
    tokens: bytes,
    extra: bytes,
) -> int:
    """A new live block, seen once; its held parent gains a reference."""
    (block_id,) = connection.execute(
        INSERT_BLOCK,
        (
            hash_,
            parent_id,
            namespace_id,
            depth,
            token_count,
            origin,
            int(exact),
            build_id,
            now,
            tick,
            tick,
        ),
    ).fetchone()
    connection.execute(INSERT_TOKENS, (block_id, tokens, extra))
    if parent_id is not None:
        add_hold(connection, parent_id)
    return int(block_id)


def revive_block(connection: Connection, row: BlockRow, tokens: bytes, extra: bytes) -> None:
    """An evicted row gets its payload back."""
    if not row.held:
        connection.execute(INSERT_TOKENS, (row.id, tokens, extra))
        if row.parent_id is not None:
            add_hold(connection, row.parent_id)
    connection.execute(SET_STATE, ("live", row.id))


def evict_block(
    connection: Connection, block_id: int, *, now: int, reason: str, detail: str | None = None
) -> tuple[int, list[int]]:
    """Drop all parts of a live block. Returns (bytes, shards that lost a part)."""
    shards = [row[0] for row in connection.execute(BLOCK_SHARDS, (block_id,))]
    (nbytes,) = connection.execute(PARTS_BYTES, (block_id,)).fetchone()
    connection.execute(INSERT_EVICTION, (now, None, reason, nbytes, detail, block_id))
    connection.execute(DELETE_PARTS, (block_id,))
    _unlive(connection, block_id)
    return int(nbytes), shards


def drop_part(
    connection: Connection,
    block_id: int,
    part: str,
    *,
    required: bool,
    now: int,
    reason: str,
    detail: str | None = None,
) -> None:
    """Drop one part; without a required part the block is no longer live (a hole if held)."""
    row = connection.execute(DELETE_PART, (block_id, part)).fetchone()
    if row is None:
        return
    connection.execute(INSERT_EVICTION, (now, part, reason, row[0], detail, block_id))
    if required:
        connection.execute(DELETE_PARTS, (block_id,))
        _unlive(connection, block_id)


def _unlive(connection: Connection, block_id: int) -> None:
    refs, state, parent_id = connection.execute(BLOCK_HOLD, (block_id,)).fetchone()
    if state != "live":
        return
    connection.execute(SET_STATE, ("evicted", block_id))
    if refs == 0:
        connection.execute(DELETE_TOKENS, (block_id,))
        drop_hold(connection, parent_id)


def supersede_tails(
    connection: Connection,
    *,
    parent_id: int | None,
    namespace_id: int,
    token_count: int,
    tokens: bytes,
) -> None:
    """Make tails that a longer sibling contains the first victims."""
    statement, key = (
        (SHORTER_ROOTS, namespace_id) if parent_id is None else (SHORTER_CHILDREN, parent_id)
    )
    rows = connection.execute(statement, (key, token_count)).fetchall()
    for block_id, own in rows:
        if own and tokens.startswith(own):  # none: they were withheld
            connection.execute(SUPERSEDE, (block_id,))


def insert_parts(connection: Connection, rows: Iterable[tuple[Any, ...]]) -> None:
    connection.executemany(INSERT_PART, rows)


def kill_if_empty(connection: Connection, shard_ids: Iterable[int]) -> list[tuple[int, str, int]]:
    """Mark shards without a live part dead. Returns (id, uuid, bytes) of each."""
    dead: list[tuple[int, str, int]] = []
    for shard_id in set(shard_ids):
        dead += connection.execute(KILL_EMPTY_SHARDS, (shard_id,)).fetchall()
    return dead


def ensure_namespace(
    connection: Connection, record: NamespaceRecord, now: int, tenant: str = ""
) -> int:
    """The id of a namespace, inserted if it is new."""
    row = connection.execute(FIND_NAMESPACE, (record.fingerprint,)).fetchone()
    if row is not None:
        connection.execute(USE_NAMESPACE, (now, record.model, tenant, row[0]))
        return int(row[0])
    return int(
        connection.execute(
            INSERT_NAMESPACE,
            (
                record.fingerprint,
                record.model,
                record.identity.to_json(),
                record.layout.to_json(),
                record.block_tokens,
                record.salt,
                record.build,
                now,
                now,
                tenant,
            ),
        ).fetchone()[0]
    )


def find_or_add_namespace(
    connection: Connection, record: NamespaceRecord, now: int
) -> tuple[int, bool]:
    """The id of a namespace, and whether it was inserted: nobody's, until an engine opens it. One
    that is there keeps its name and tenant."""
    row = connection.execute(FIND_NAMESPACE, (record.fingerprint,)).fetchone()
    if row is not None:
        return int(row[0]), False
    return ensure_namespace(connection, record, now), True


def namespace_record(connection: Connection, namespace_id: int) -> NamespaceRecord:
    """A namespace as its shards describe it. Raises UsageError when there is none."""
    row = connection.execute(NAMESPACE_RECORD, (namespace_id,)).fetchone()
    if row is None:
        raise UsageError("The namespace belongs to another store.")
    fingerprint, model, identity, layout, block_tokens, salt, build = row
    try:
        parsed = ModelIdentity.from_json(identity)
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"Namespace {namespace_id} is damaged; run kvdb rebuild.") from error
    return NamespaceRecord(
        fingerprint,
        model,
        parsed,
        Layout.from_json(layout),
        block_tokens,
        salt,
        build,
    )
