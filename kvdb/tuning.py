"""What the history says about how a server is set up: how full its batches are, and how often it
has to read from disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdb.store import Store

DAY_US = 24 * 3600 * 1_000_000
MOST_ROWS = 10_000
# Fewer requests say nothing.
ENOUGH = 20
LOW_FILL = 0.5
HIGH_DISK = 0.3
# Programs that answer one request and end have neither batches nor a RAM tier.
RECENT = """
SELECT coalesce(n.model, ''), r.started_at, r.first_token_ms, r.total_ms, r.bytes_read > 0
FROM requests AS r LEFT JOIN namespaces AS n ON n.id = r.namespace_id
WHERE r.started_at > ?1 - ?2 AND r.client NOT LIKE 'kvdb %'
ORDER BY r.started_at DESC LIMIT ?3
"""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Of ``requests`` in the last day: how many of the requests that could decode together did on
    average while any did, by model, and which share of all read from disk."""

    requests: int
    together: dict[str, float]
    disk_share: float

    @property
    def enough(self) -> bool:
        return self.requests >= ENOUGH


def recent_tuning(store: Store) -> Tuning:
    """From the newest requests of the last day."""
    with store.database.read() as connection:
        rows = connection.execute(
            RECENT, (store.environment.now_us(), DAY_US, MOST_ROWS)
        ).fetchall()
    spans: dict[str, list[tuple[float, float]]] = {}
    for model, started, first_ms, total_ms, _ in rows:
        if first_ms is not None and total_ms is not None and total_ms > first_ms:
            began = started / 1000
            spans.setdefault(model, []).append((began + first_ms, began + total_ms))
    share = sum(row[4] for row in rows) / len(rows) if rows else 0.0
    return Tuning(len(rows), {model: overlap(some) for model, some in spans.items()}, share)


def overlap(spans: Iterable[tuple[float, float]]) -> float:
    """How many spans there are at once, on average over the time in which there is any."""
    length = busy = 0.0
    end = float("-inf")
    for first, last in sorted(spans):
        length += last - first
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return length / busy if busy else 0.0


def advice(
    tuning: Tuning, places: Callable[[str], int], ram: int
) -> Sequence[tuple[str, str, str]]:
    """``(name, finding, what to do)`` of each thing worth changing; nothing to do is "". ``places``
    is how many requests of a model may run at once, ``ram`` the bytes of the RAM tier."""
    if not tuning.enough:
        return ()
    found = []
    for model, together in sorted(tuning.together.items()):
        fill = together / places(model)
        todo = ""
        if fill < LOW_FILL:
            todo = (
                f"Raise the clients' concurrency: {places(model)} requests to {model} decode "
                "together in little more time than one."
            )
        found.append(("batch fill", f"{fill:.0%} of {places(model)} places, {model}", todo))
    todo = ""
    if tuning.disk_share > HIGH_DISK:
        todo = (
            f"Raise --ram (now {ram} bytes): what is in RAM is restored without reading."
            if ram
            else "Set --ram: without it everything is read from disk."
        )
    found.append(("disk reads", f"{tuning.disk_share:.0%} of requests read from disk", todo))
    return found
