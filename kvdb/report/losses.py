"""What left the store and why, and what was written to the disk, by day."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvdb.driver import Connection
from kvdb.report.history import DAY_US, Scope

# Reason in `evictions` → what it means to whoever owns the store.
REASONS: Mapping[str, str] = {
    "limit": "for lack of room",
    "quota": "over a quota",
    "manual": "removed by hand",
    "expired": "expired",
    "replaced": "replaced by an exact one",
    "damaged": "damaged",
    "missing": "with their file gone",
}
EVICTED = """
SELECT day_at, reason, sum(evictions) FROM eviction_totals
WHERE (:since IS NULL OR day_at >= :since) AND (:namespace IS NULL OR namespace_id = :namespace)
GROUP BY 1, 2 ORDER BY 1
"""
WRITTEN = """
SELECT day_at, sum(nbytes) FROM write_totals
WHERE (:since IS NULL OR day_at >= :since) AND (:namespace IS NULL OR namespace_id = :namespace)
GROUP BY 1 ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Blocks and parts that left on one day (its start, Unix µs) for one reason."""

    day_us: int
    reason: str
    blocks: int


def read_evictions(connection: Connection, scope: Scope) -> list[Evicted]:
    return [Evicted(*row) for row in connection.execute(EVICTED, _parameters(scope))]


def read_wear(connection: Connection, scope: Scope) -> dict[int, int]:
    """Bytes of published shards by day (its start, Unix µs)."""
    return dict(connection.execute(WRITTEN, _parameters(scope)).fetchall())


def _parameters(scope: Scope) -> dict[str, int | None]:
    since = scope.since_us
    whole_day = None if since is None else since // DAY_US * DAY_US
    return {"since": whole_day, "namespace": scope.namespace_id}
