"""What the history says: requests by time and by tenant, what left the store, what was written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvdb.driver import Connection

HOUR_US = 3_600 * 1_000_000
DAY_US = 24 * HOUR_US
WEEK_US = 7 * DAY_US
# The longest history that is drawn by the hour, and by the day.
HOURS_UP_TO_US = 3 * DAY_US
DAYS_UP_TO_US = 120 * DAY_US


@dataclass(frozen=True, slots=True)
class Scope:
    """Which requests the page is about; None means all. It begins with a whole hour, as
    totals are kept by the hour."""

    since_us: int | None = None
    namespace_id: int | None = None
    tenant: str | None = None

    def parameters(self) -> dict[str, int | str | None]:
        since = None if self.since_us is None else self.since_us // HOUR_US * HOUR_US
        return {"since": since, "namespace": self.namespace_id, "tenant": self.tenant}


@dataclass(slots=True)
class Use:
    """Requests added up; ``forwarded_tokens`` were computed or refilled. ``seconds_saved``:
    restored tokens at the prefill speed measured in their namespace, less the time their restore
    took; tokens of namespaces without a measured speed count in ``unmeasured_tokens`` instead."""

    requests: int = 0
    full_skips: int = 0
    prompt_tokens: int = 0
    restored_tokens: int = 0
    forwarded_tokens: int = 0
    seconds_saved: float = 0.0
    unmeasured_tokens: int = 0

    def add(self, other: Use) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def hit_ratio(self) -> float:
        return self.restored_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class History:
    """Requests of a scope. ``periods`` are keyed by their start (Unix µs) and ``period_us`` long,
    those without a request left out; ``first_us`` and ``last_us`` are the first and last hour."""

    total: Use
    period_us: int
    periods: Mapping[int, Use]
    tenants: Mapping[str, Use]
    first_us: int
    last_us: int

    @property
    def measured(self) -> bool:
        """True if the seconds saved are known of any restored token."""
        return self.total.unmeasured_tokens < self.total.restored_tokens


# As the view `savings` has it, from totals over all time: a short scope says little of speed.
SPEEDS = """
SELECT namespace_id, sum(timed_ms) / sum(timed_tokens)
FROM request_totals GROUP BY namespace_id HAVING sum(timed_tokens) > 0
"""
SPAN = """
SELECT min(hour_at), max(hour_at) FROM hourly_totals
WHERE (:since IS NULL OR hour_at >= :since)
    AND (:namespace IS NULL OR namespace_id = :namespace)
    AND (:tenant IS NULL OR tenant = :tenant)
"""
USES = """
SELECT hour_at / :period_us * :period_us, tenant, namespace_id, sum(requests), sum(full_skips),
    sum(prompt_tokens), sum(restored_tokens), sum(computed_tokens + refilled_tokens),
    sum(restore_ms)
FROM hourly_totals
WHERE (:since IS NULL OR hour_at >= :since)
    AND (:namespace IS NULL OR namespace_id = :namespace)
    AND (:tenant IS NULL OR tenant = :tenant)
GROUP BY 1, 2, 3
"""


def read_history(connection: Connection, scope: Scope) -> History | None:
    """The requests of a scope; None when there are none."""
    first, last = connection.execute(SPAN, scope.parameters()).fetchone()
    if first is None:
        return None
    span = last - first
    period_us = HOUR_US if span <= HOURS_UP_TO_US else DAY_US if span <= DAYS_UP_TO_US else WEEK_US
    ms_per_token: dict[int, float] = dict(connection.execute(SPEEDS).fetchall())
    total = Use()
    periods: defaultdict[int, Use] = defaultdict(Use)
    tenants: defaultdict[str, Use] = defaultdict(Use)
    rows = connection.execute(USES, {**scope.parameters(), "period_us": period_us})
    for period, tenant, namespace_id, *counts, restore_ms in rows:
        added = Use(*counts)
        restored = added.restored_tokens
        if namespace_id in ms_per_token:
            added.seconds_saved = (restored * ms_per_token[namespace_id] - restore_ms) / 1e3
        else:
            added.unmeasured_tokens = restored
        for use in (total, periods[period], tenants[tenant]):
            use.add(added)
    return History(total, period_us, dict(periods), dict(tenants), first, last)
