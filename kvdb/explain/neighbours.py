"""Finds the stored chain that a prompt shares most with, among what the index still has."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvdb.driver import Connection
from kvdb.explain.case import Case, Neighbour, equal_parts
from kvdb.identity import Tokens
from kvdb.index import tokens_from_blob
from kvdb.match import common_prefix
from kvdb.segments import Segment, load_segments

MOST_CHILDREN = 512
RECENT_REQUESTS = 64
MOST_TOKENS = 1 << 17

# Held blocks have their tokens; of those that are not, only hashes are left.
CHILDREN = (
    "SELECT b.id, b.hash, t.tokens FROM blocks AS b JOIN block_tokens AS t ON t.block_id = b.id "
    "WHERE b.parent_id = ? AND b.created_at < ? ORDER BY b.id DESC LIMIT ?"
)
ROOTS = (
    "SELECT b.id, b.hash, t.tokens FROM blocks AS b JOIN block_tokens AS t ON t.block_id = b.id "
    "WHERE b.parent_id IS NULL AND b.namespace_id = ? AND b.created_at < ? "
    "ORDER BY b.id DESC LIMIT ?"
)
REQUESTS = (
    "SELECT id, tip_id, prompt_tokens, segments, unstored FROM requests "
    "WHERE namespace_id = ? AND started_at < ? AND id <> ? ORDER BY id DESC LIMIT ?"
)
# The ancestors at one depth of some tips.
CLIMB = """
WITH RECURSIVE climb (tip, id, parent_id, depth) AS (
    SELECT id, id, parent_id, depth FROM blocks WHERE id IN (SELECT value FROM json_each(?1))
    UNION ALL
    SELECT climb.tip, b.id, b.parent_id, b.depth
    FROM climb JOIN blocks AS b ON b.id = climb.parent_id WHERE climb.depth > ?2
)
SELECT tip, id FROM climb WHERE depth = ?2
"""
# Tokens from a tip up to one depth, root first.
CHAIN_TOKENS = """
WITH RECURSIVE chain (id, parent_id, depth) AS (
    SELECT id, parent_id, depth FROM blocks WHERE id = ?1
    UNION ALL
    SELECT b.id, b.parent_id, b.depth
    FROM chain JOIN blocks AS b ON b.id = chain.parent_id WHERE chain.depth > ?2
)
SELECT t.tokens FROM chain LEFT JOIN block_tokens AS t ON t.block_id = chain.id
WHERE chain.depth >= ?2 ORDER BY chain.depth
"""

# Requests that ended below some blocks, for a neighbour that no recent request is.
BELOW = """
WITH RECURSIVE below (id) AS (
    SELECT value FROM json_each(?1)
    UNION ALL
    SELECT b.id FROM below JOIN blocks AS b ON b.parent_id = below.id
    LIMIT 4096
)
SELECT id, tip_id, prompt_tokens, segments, unstored FROM requests
WHERE id > (SELECT max(id) FROM requests) - 20000 AND tip_id IN (SELECT id FROM below)
    AND started_at < ?2 AND id <> ?3 ORDER BY id DESC LIMIT 16
"""


class PastRequest(NamedTuple):
    """A request of the same namespace, as history keeps it."""

    id: int
    tip_id: int | None
    prompt_tokens: int
    segments: list[Segment]
    unstored: str | None


class _Child(NamedTuple):
    id: int
    hash: bytes
    tokens: Tokens


def recent_requests(connection: Connection, case: Case) -> list[PastRequest]:
    """The newest requests before the case, those first that have most parts in common with it."""
    own = case.request_id or 0
    given = (case.space.id, case.before, own, RECENT_REQUESTS)
    return _ranked(case, connection.execute(REQUESTS, given))


def _ranked(case: Case, rows: Iterable[tuple[Any, ...]]) -> list[PastRequest]:
    mine = {segment.digest for segment in case.segments if segment.digest}
    return sorted(
        (
            PastRequest(id_, tip, count, load_segments(segments), unstored)
            for id_, tip, count, segments, unstored in rows
        ),
        key=lambda request: (
            equal_parts(case.segments, request.segments),
            len(mine & {segment.digest for segment in request.segments}),
            request.id,
        ),
        reverse=True,
    )


def nearest(
    connection: Connection, case: Case, requests: Sequence[PastRequest]
) -> Neighbour | None:
    """The chain with the longest common prefix, by tokens; among equals one that a request with
    like parts ended in, else the newest. None where nothing is stored behind the matched blocks."""
    size = case.space.block_tokens
    depth, parent = case.matched, case.tip_id
    while True:
        children = _children(connection, case, parent)
        if not children:
            return None
        rest = case.tokens[depth * size : (depth + 1) * size]
        shared = [common_prefix(rest, child.tokens) for child in children]
        best = max(shared)
        tied = [child for child, count in zip(children, shared, strict=True) if count == best]
        if best < size or len(tied[0].tokens) < size:
            break
        # It was not there when the prompt was matched, and is now: the difference lies deeper.
        if (depth + 1) * size >= len(case.tokens):
            break
        depth, parent = depth + 1, tied[0].id
    return _follow(connection, case, depth, tied, depth * size + best, requests)


def _children(connection: Connection, case: Case, parent: int | None) -> list[_Child]:
    if parent is None:
        rows = connection.execute(ROOTS, (case.space.id, case.before, MOST_CHILDREN))
    else:
        rows = connection.execute(CHILDREN, (parent, case.before, MOST_CHILDREN))
    return [
        _Child(id_, bytes(hash_), tokens_from_blob(blob))
        for id_, hash_, blob in rows
        if id_ not in case.own
    ]


def _follow(
    connection: Connection,
    case: Case,
    depth: int,
    tied: Sequence[_Child],
    shared: int,
    requests: Sequence[PastRequest],
) -> Neighbour:
    """The chain through one of ``tied``, from there on as far as its tokens go."""
    before = case.tokens[: depth * case.space.block_tokens]
    children = {child.id: child for child in tied}
    found = _request_below(connection, children, depth, requests)
    if found is None:
        given = (json.dumps(list(children)), case.before, case.request_id or 0)
        older = _ranked(case, connection.execute(BELOW, given))
        found = _request_below(connection, children, depth, older)
    if found is None:
        child = tied[0]
        rest = [child.tokens, *_walk_down(connection, case, child.id)]
        return Neighbour(np.concatenate([before, *rest]), shared, child.hash)
    request, child = found
    blobs = connection.execute(CHAIN_TOKENS, (request.tip_id, depth)).fetchall()
    known = [
        tokens_from_blob(blob)
        for (blob,) in itertools.takewhile(lambda row: row[0] is not None, blobs)
    ]
    return Neighbour(
        np.concatenate([before, *known]),
        shared,
        child.hash,
        request.id,
        request.prompt_tokens,
        request.segments,
    )


def _request_below(
    connection: Connection,
    children: Mapping[int, _Child],
    depth: int,
    requests: Sequence[PastRequest],
) -> tuple[PastRequest, _Child] | None:
    """The first of ``requests`` whose chain goes through one of ``children``, and that one."""
    tips = json.dumps([request.tip_id for request in requests if request.tip_id is not None])
    above = dict(connection.execute(CLIMB, (tips, depth)).fetchall())
    for request in requests:
        child = children.get(above.get(request.tip_id, 0))
        if child is not None:
            return request, child
    return None


def _walk_down(connection: Connection, case: Case, block_id: int) -> list[Tokens]:
    """Tokens of the newest blocks below one."""
    found: list[Tokens] = []
    count = 0
    while count < MOST_TOKENS:
        row = connection.execute(CHILDREN, (block_id, case.before, 1)).fetchone()
        if row is None:
            break
        block_id = row[0]
        found.append(tokens_from_blob(row[2]))
        count += len(found[-1])
    return found
