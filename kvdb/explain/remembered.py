"""What the store remembers of state it has not: evictions, holes, other namespaces, speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvdb.driver import Connection
from kvdb.explain.case import END_OF_TIME, Case
from kvdb.explain.keyspaces import KeySpace, key_spaces
from kvdb.explain.wording import remote_words
from kvdb.identity import chain_hashes

# The newest loss of a block; a part that went alone is a loss where the block could not do
# without it, and then the block is missing too.
LOSS = (
    "SELECT reason, evicted_at, detail FROM evictions "
    "WHERE block_hash = ? AND evicted_at <= ? AND reason <> 'expired' ORDER BY id DESC LIMIT 1"
)
EXPIRY = (
    "SELECT evicted_at, detail FROM evictions "
    "WHERE block_hash = ? AND evicted_at <= ? AND reason = 'expired' ORDER BY id DESC LIMIT 1"
)
EVICTED_ROW = "SELECT 1 FROM blocks WHERE hash = ? AND state = 'evicted' AND refs = 0"
HELD_BEFORE = (
    "SELECT 1 FROM blocks WHERE hash = ? AND (state = 'live' OR refs > 0) AND created_at < ?"
)
PAST_REMOTE = (
    "SELECT remote, remote_decision, remote_tokens, bytes_remote, load_estimate_ms, "
    "compute_estimate_ms FROM requests WHERE id = ? AND remote_decision IS NOT NULL"
)
SPEED = """
SELECT sum(prefill_ms) / sum(computed_tokens + refilled_tokens) FROM (
    SELECT prefill_ms, computed_tokens, refilled_tokens FROM requests
    WHERE namespace_id = ? AND computed_tokens + refilled_tokens >= 16 AND prefill_ms > 0
    ORDER BY id DESC LIMIT 1000)
"""


class Loss(NamedTuple):
    """``tokens`` of the prompt that were stored and are gone: why and when (Unix µs) the first of
    their blocks went, ``forgotten`` and None where history no longer says; ``expired`` is the name
    whose time ended before, if one held them."""

    reason: str
    at: int | None
    detail: str | None
    tokens: int
    expired: str | None


def find_loss(connection: Connection, case: Case) -> Loss | None:
    """What the blocks behind the matched ones say: equal hash means that just this was stored."""
    first: tuple[str, int | None, str | None] | None = None
    expired: str | None = None
    count = 0
    for hash_ in case.hashes[case.matched :]:
        row = connection.execute(LOSS, (hash_, case.before)).fetchone()
        if row is None:
            # History forgets; the rows of evicted blocks stay longer. A past request may have
            # brought its own block back, so that nothing is left to tell.
            if case.before != END_OF_TIME:
                break
            if connection.execute(EVICTED_ROW, (hash_,)).fetchone() is None:
                break
        first = first or (("forgotten", None, None) if row is None else row)
        ended = connection.execute(EXPIRY, (hash_, case.before)).fetchone()
        expired = expired or (None if ended is None else str(ended[1]))
        count += 1
    if first is None:
        return None
    end = min((case.matched + count) * case.space.block_tokens, len(case.tokens))
    return Loss(*first, end - case.matched * case.space.block_tokens, expired)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another namespace that holds the first ``tokens`` of the prompt."""

    space: KeySpace
    tokens: int


def find_elsewhere(connection: Connection, case: Case) -> Elsewhere | None:
    """The namespace that holds most of the prompt, where that is more than its own does."""
    best: Elsewhere | None = None
    for space in key_spaces(connection):
        if space.id == case.space.id or space.fingerprint is None:
            continue
        hashes = chain_hashes(space.fingerprint, case.tokens, space.block_tokens)
        count = _held(connection, hashes, case.before)
        tokens = min(count * space.block_tokens, len(case.tokens))
        # Less than a block more may be the same chance end that its own namespace has.
        if tokens > case.reach and (best is None or tokens > best.tokens):
            best = Elsewhere(space, tokens)
    return best


def _held(connection: Connection, hashes: Sequence[bytes], before: int) -> int:
    """How many leading blocks are held; held is monotone along a chain, so halving finds it."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if connection.execute(HELD_BEFORE, (hashes[middle - 1], before)).fetchone():
            low = middle
        else:
            high = middle - 1
    return low


def seconds_per_token(connection: Connection, namespace_id: int | None) -> float | None:
    """Prefill time as measured in a namespace; None where nothing was."""
    if namespace_id is None:
        return None
    (value,) = connection.execute(SPEED, (namespace_id,)).fetchone()
    return None if value is None else value / 1e3


def past_remote(connection: Connection, request_id: int) -> str | None:
    """What a request had of remotes, in a sentence; None where none was asked."""
    row = connection.execute(PAST_REMOTE, (request_id,)).fetchone()
    if row is None:
        return None
    return remote_words(row[0] or "A remote", *row[1:])
