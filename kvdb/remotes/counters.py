"""What became of the objects of one remote: counted here, added to its row behind requests."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal, get_args

from kvdb.driver import Connection
from kvdb.remotes.economics import Rates

Count = Literal[
    "asked",
    "found",
    "got",
    "got_bytes",
    "put",
    "put_bytes",
    "present",
    "rejected",
    "failed",
    "late",
    "dropped",
]
COUNTS: tuple[Count, ...] = get_args(Count)
# Several processes count in one row, so each adds what it has counted since.
ADD_COUNTS = (
    f"UPDATE remotes SET {', '.join(f'{name} = {name} + ?' for name in COUNTS)}, "  # noqa: S608
    "round_trip_ms = coalesce(?, round_trip_ms), bytes_per_second = coalesce(?, bytes_per_second), "
    "last_error = coalesce(?, last_error), last_error_at = coalesce(?, last_error_at), "
    "down_until = ? WHERE id = ?"
)
MAX_ERROR = 500


class Counters:
    """``totals`` are what this process has counted."""

    def __init__(self, remote_id: int, rates: Rates) -> None:
        self._id = remote_id
        self._rates = rates
        self._new: Counter[str] = Counter()
        self._error: tuple[str, int] | None = None
        self._down_until: int | None = None
        self._mutex = threading.Lock()
        self.totals: Counter[str] = Counter()

    def add(self, name: Count, count: int = 1) -> None:
        with self._mutex:
            self._new[name] += count
            self.totals[name] += count

    def went_wrong(self, message: str, now_us: int) -> None:
        with self._mutex:
            self._error = (message[:MAX_ERROR], now_us)

    def down(self, until_us: int | None) -> None:
        """Until when it is not asked; None: it is."""
        with self._mutex:
            self._down_until = until_us

    def write(self, connection: Connection) -> None:
        """Add to the row what is new since the last time."""
        with self._mutex:
            new, self._new = self._new, Counter()
            error, self._error = self._error, None
            down_until = self._down_until
        if not self._id:
            return
        rates = (self._rates.round_trip_ms, self._rates.bytes_per_second)
        counts = [new[name] for name in COUNTS]
        connection.execute(
            ADD_COUNTS, (*counts, *rates, *(error or (None, None)), down_until, self._id)
        )
