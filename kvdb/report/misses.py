"""The costliest misses, each with its diagnosis.

Requests of one tenant that stopped matching at the same block for the same reason are one miss
that happened several times. It is explained by its latest request whose tokens are still there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvdb.driver import Database
from kvdb.errors import KvdbError
from kvdb.explain import Explanation, explain_request
from kvdb.report.history import Scope
from kvdb.report.tree import Decoder

if TYPE_CHECKING:
    from kvdb.store import Store

MOST = 10
# So many of a miss's latest requests are tried.
MOST_TRIED = 5
TOKENS_GONE = "tokens_gone"
COSTLIEST = """
SELECT tenant, namespace_id, miss_reason, deepest_block_id, count(*), max(started_at),
    sum(computed_tokens + refilled_tokens), sum(coalesce(prefill_ms, 0)) / 1000
FROM requests
WHERE miss_reason IS NOT NULL
    AND (:since IS NULL OR started_at >= :since)
    AND (:namespace IS NULL OR namespace_id = :namespace)
    AND (:tenant IS NULL OR tenant = :tenant)
GROUP BY 1, 2, 3, 4
ORDER BY 8 DESC, 7 DESC, 6 DESC LIMIT :most
"""
LATEST = """
SELECT id FROM requests
WHERE tenant = ? AND namespace_id IS ? AND miss_reason = ? AND deepest_block_id IS ?
ORDER BY id DESC LIMIT ?
"""

# Request id and its namespace → why it missed.
Explain = Callable[[int, int | None], Explanation]


@dataclass(frozen=True, slots=True)
class Miss:
    """What happened ``requests`` times, last at ``latest_us``; ``computed_tokens`` and ``seconds``
    are those of all of them. ``explanation`` is that of ``request_id``; None when it went."""

    tenant: str
    namespace_id: int | None
    reason: str
    requests: int
    latest_us: int
    computed_tokens: int
    seconds: float
    request_id: int
    explanation: Explanation | None


def explainer(store: Store, decoder: Decoder) -> Explain:
    """Explains requests of ``store``; of prompts without a decoder it says no text."""

    def explain(request_id: int, namespace_id: int | None) -> Explanation:
        decode = None if namespace_id is None else decoder(namespace_id)
        explanation = explain_request(store, request_id, decode)
        if decode is None:  # token ids tell people nothing, and programs all
            return replace(explanation, stored_text=None, prompt_text=None)
        return explanation

    return explain


def costliest_misses(
    database: Database, scope: Scope, explain: Explain, most: int = MOST
) -> list[Miss]:
    """At most ``most``, by the seconds that their prefills took."""
    with database.read() as connection:
        rows = connection.execute(COSTLIEST, {**scope.parameters(), "most": most}).fetchall()
        latest = [
            [id_ for (id_,) in connection.execute(LATEST, (*row[:4], MOST_TRIED))] for row in rows
        ]
    misses = []
    for row, request_ids in zip(rows, latest, strict=True):
        tenant, namespace_id, reason, _, requests, latest_us, tokens, seconds = row
        request_id, explanation = _explain_one(explain, request_ids, namespace_id)
        misses.append(
            Miss(
                tenant,
                namespace_id,
                reason,
                requests,
                latest_us,
                tokens,
                seconds,
                request_id,
                explanation,
            )
        )
    return misses


def _explain_one(
    explain: Explain, request_ids: list[int], namespace_id: int | None
) -> tuple[int, Explanation | None]:
    """The first of these requests that can be explained, else the first, and its explanation."""
    gone = None
    for request_id in request_ids:
        try:
            explanation = explain(request_id, namespace_id)
        except KvdbError:  # its row, or what it is compared with, went meanwhile
            continue
        if explanation.code != TOKENS_GONE:
            return request_id, explanation
        gone = gone or explanation
    return request_ids[0], gone
