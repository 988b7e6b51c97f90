"""A past request as a case: its tokens from the chain it ended in, the store as it was then."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvdb.driver import Connection
from kvdb.errors import UsageError
from kvdb.explain.case import Case, Decode, part_title
from kvdb.explain.explanation import Explanation
from kvdb.explain.keyspaces import key_space
from kvdb.explain.wording import words
from kvdb.identity import Tokens, chain_hashes
from kvdb.index import tokens_from_blob
from kvdb.segments import Segment, load_segments

REQUEST = (
    "SELECT r.namespace_id, r.started_at, r.prompt_tokens, r.restored_tokens, "
    "r.refilled_tokens + r.masked_tokens, "
    "r.miss_reason, r.tip_id, r.segments, b.depth, b.id, r.total_ms, "
    "coalesce(r.first_token_ms, r.lookup_ms, 0) "
    "FROM requests AS r LEFT JOIN blocks AS b ON b.id = r.deepest_block_id WHERE r.id = ?"
)
CHAIN = """
WITH RECURSIVE chain (id, parent_id, depth) AS (
    SELECT id, parent_id, depth FROM blocks WHERE id = ?
    UNION ALL
    SELECT b.id, b.parent_id, b.depth FROM chain JOIN blocks AS b ON b.id = chain.parent_id
)
SELECT chain.id, t.tokens FROM chain LEFT JOIN block_tokens AS t ON t.block_id = chain.id
ORDER BY depth
"""
DAMAGE = (
    "SELECT 1 FROM evictions WHERE block_hash = ? AND evicted_at <= ? "
    "AND reason IN ('damaged', 'missing')"
)
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
    "no_boundary": "no state or window was stored where what it shared ended",
}


def past_case(connection: Connection, request_id: int, text: Decode | None) -> Case | Explanation:
    """The case of a request, or all that can be said without its tokens. Raises UsageError."""
    row = connection.execute(REQUEST, (request_id,)).fetchone()
    if row is None:
        raise UsageError(f"There is no request {request_id} in the store's history.")
    namespace_id, started, count, restored, holes, reason, tip_id, segments, *rest = row
    depth, deepest, total_ms, first_ms = rest
    parts = load_segments(segments)
    space = None if namespace_id is None else key_space(connection, namespace_id)
    reach = restored + holes
    if reason is None:
        return _said_by_row(count, restored, "hit", parts, None, reason)
    if reason == "inexact":
        return _said_by_row(count, restored, "inexact", parts, reach, reason)
    chain = [] if tip_id is None else connection.execute(CHAIN, (tip_id,)).fetchall()
    tokens = _tokens([blob for _, blob in chain])
    if tokens is None or len(tokens) < count or space is None or space.fingerprint is None:
        return _said_by_row(count, restored, "tokens_gone", parts, reach, reason)
    prompt, matched = tokens[:count], 0 if depth is None else depth + 1
    case = Case(
        space,
        prompt,
        chain_hashes(space.fingerprint, prompt, space.block_tokens),
        parts,
        text,
        matched=matched,
        tip_id=deepest,
        hits=restored,
        reach=reach,
        stored=min(matched * space.block_tokens, count) if reason == "no_boundary" else 0,
        before=started + int(first_ms * 1e3),  # what is put until then is its own
        own=frozenset(id_ for id_, _ in chain),
        request_id=request_id,
    )
    if reason in ("damaged", "missing"):
        return _at_damage(connection, case, started + int((total_ms or 0) * 1e3))
    return case


def _tokens(blobs: list[bytes | None]) -> Tokens | None:
    known = [tokens_from_blob(blob) for blob in blobs if blob is not None]
    return np.concatenate(known) if known and len(known) == len(blobs) else None


def _at_damage(connection: Connection, case: Case, end: int) -> Case:
    """Damage is found by reading, after the look-up: the case stops at the first such block."""
    for index, hash_ in enumerate(case.hashes):
        if connection.execute(DAMAGE, (hash_, end)).fetchone():
            reach = index * case.space.block_tokens
            return replace(case, matched=index, reach=reach, before=end)
    return case


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
    return Explanation(
        prompt_tokens=prompt,
        hit_tokens=hits,
        code=code,
        diagnosis=diagnosis,
        advice=advice,
        differing_token=at,
        where=part_title(parts, at),
    )
