"""A past request as a case: its tokens from the chain it ended in, the store as it was then."""

from __future__ import annotations

import numpy as np

from kvdb.driver import Connection
from kvdb.errors import UsageError
from kvdb.explain.case import Case, Decode, part_at
from kvdb.explain.explanation import Explanation
from kvdb.explain.keyspaces import key_space
from kvdb.explain.wording import words
from kvdb.identity import Tokens, chain_hashes
from kvdb.index import tokens_from_blob
from kvdb.segments import Segment, load_segments

REQUEST = (
    "SELECT r.namespace_id, r.started_at, r.prompt_tokens, r.restored_tokens, r.refilled_tokens, "
    "r.miss_reason, r.tip_id, r.segments, b.depth, b.id "
    "FROM requests AS r LEFT JOIN blocks AS b ON b.id = r.deepest_block_id WHERE r.id = ?"
)
CHAIN = """
WITH RECURSIVE chain (id, parent_id, depth) AS (
    SELECT id, parent_id, depth FROM blocks WHERE id = ?
    UNION ALL
    SELECT b.id, b.parent_id, b.depth FROM chain JOIN blocks AS b ON b.id = chain.parent_id
)
SELECT t.tokens FROM chain LEFT JOIN block_tokens AS t ON t.block_id = chain.id ORDER BY depth
"""
# What a row says alone, in words.
ROW_REASONS = {
    "empty_store": "the store was empty",
    "new_namespace": "nothing was stored for this model with these settings",
    "diverged": "the prompt parted from what was stored",
    "not_stored": "no stored prompt went on like this one",
    "evicted": "what it needed had been evicted",
    "expired": "what it needed had expired",
    "damaged": "what it needed was damaged",
    "missing": "what it needed was gone",
    "inexact": "exact mode could not use what was there",
}


def past_case(connection: Connection, request_id: int, text: Decode | None) -> Case | Explanation:
    """The case of a request, or all that can be said without its tokens. Raises UsageError."""
    row = connection.execute(REQUEST, (request_id,)).fetchone()
    if row is None:
        raise UsageError(f"There is no request {request_id} in the store's history.")
    namespace_id, started, count, restored, refilled, reason, tip_id, segments, depth, deepest = row
    parts, _ = load_segments(segments)
    space = None if namespace_id is None else key_space(connection, namespace_id)
    reach = restored + refilled
    if reason is None:
        return _said_by_row(count, restored, "hit", parts, None, reason)
    tokens = None if tip_id is None else _chain(connection, tip_id)
    if tokens is None or len(tokens) < count or space is None or space.fingerprint is None:
        return _said_by_row(count, restored, "tokens_gone", parts, reach, reason)
    if reason == "inexact":
        return _said_by_row(count, restored, "inexact", parts, reach, reason)
    prompt = tokens[:count]
    return Case(
        space,
        prompt,
        chain_hashes(space.fingerprint, prompt, space.block_tokens),
        parts,
        text,
        matched=0 if depth is None else depth + 1,
        tip_id=deepest,
        hits=restored,
        reach=reach,
        before=started,
    )


def _chain(connection: Connection, tip_id: int) -> Tokens | None:
    blobs = [row[0] for row in connection.execute(CHAIN, (tip_id,))]
    if not blobs or any(blob is None for blob in blobs):
        return None
    return np.concatenate([tokens_from_blob(blob) for blob in blobs])


def _said_by_row(
    prompt: int,
    hits: int,
    code: str,
    parts: list[Segment],
    at: int | None,
    reason: str | None,
) -> Explanation:
    facts = {"reason": ROW_REASONS.get(reason or "", reason or "nothing was missing")}
    diagnosis, advice = words(code, facts)
    index = None if at is None else part_at(parts, at)
    tools = sum(part.kind == "tool" for part in parts)
    return Explanation(
        prompt_tokens=prompt,
        hit_tokens=hits,
        code=code,
        diagnosis=diagnosis,
        advice=advice,
        differing_token=at,
        where=None if index is None else parts[index].title(tools),
    )
