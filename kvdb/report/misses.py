"""The costliest misses, each with its diagnosis.

Requests that stopped matching at the same block for the same reason are one miss that happened
several times; its latest request is the one that is explained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvdb.driver import Database
from kvdb.errors import KvdbError
from kvdb.explain import Explanation
from kvdb.report.history import Scope

MOST = 10
# What matched nothing is a miss of its own. Refilled and computed tokens are what it cost.
COSTLIEST = """
SELECT count(*), max(id), max(started_at), sum(computed_tokens + refilled_tokens),
    sum(coalesce(prefill_ms, 0)) / 1000, tenant, namespace_id, miss_reason
FROM requests
WHERE miss_reason IS NOT NULL
    AND (:since IS NULL OR started_at >= :since)
    AND (:namespace IS NULL OR namespace_id = :namespace)
    AND (:tenant IS NULL OR tenant = :tenant)
GROUP BY namespace_id, tenant, miss_reason, coalesce(deepest_block_id, -id)
ORDER BY 5 DESC, 4 DESC, 2 DESC LIMIT :most
"""

# Request id and its namespace → why it missed.
Explain = Callable[[int, int | None], Explanation]


@dataclass(frozen=True, slots=True)
class Miss:
    """What happened ``requests`` times, last to ``request_id`` at ``latest_us``. ``explanation``
    is None where the history no longer tells enough."""

    requests: int
    request_id: int
    latest_us: int
    computed_tokens: int
    seconds: float
    tenant: str
    namespace_id: int | None
    reason: str
    explanation: Explanation | None


def costliest_misses(
    database: Database, scope: Scope, explain: Explain, most: int = MOST
) -> list[Miss]:
    """At most ``most``, by the seconds their prefills took."""
    with database.read() as connection:
        rows: list[tuple[Any, ...]] = connection.execute(
            COSTLIEST, {**scope.parameters(), "most": most}
        ).fetchall()
    return [Miss(*(*row, _explained(explain, row[1], row[6]))) for row in rows]


def _explained(explain: Explain, request_id: int, namespace_id: int | None) -> Explanation | None:
    try:
        return explain(request_id, namespace_id)
    except KvdbError:  # the request, or what it is compared with, went meanwhile
        return None
