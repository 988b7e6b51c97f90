"""Load or recompute: what a remote gives per second against what the model computes."""

from __future__ import annotations

import threading
from collections.abc import Callable

# How much the newest measurement counts.
NEWEST = 0.3
# Fewer bytes measure the round trip, not the bandwidth.
LEAST_BYTES = 64 << 10
# While nobody knows how fast the model computes, a load that is felt is not made: computing so many
# tokens at most measures that.
FELT_MS, MEASURING_TOKENS = 250.0, 4096
# What was measured longer ago says nothing of today: the remote is tried again.
STALE_SECONDS = 600.0


class Rates:
    """Moving averages of one remote. Thread-safe; ``seconds`` is a monotonic clock."""

    def __init__(
        self,
        seconds: Callable[[], float],
        round_trip_ms: float | None = None,
        bytes_per_second: float | None = None,
    ) -> None:
        self._seconds = seconds
        self._mutex = threading.Lock()
        self._answered_at = self._moved_at = seconds()
        self._round_trip_ms = round_trip_ms
        self._bytes_per_second = bytes_per_second

    @property
    def round_trip_ms(self) -> float | None:
        return self._round_trip_ms

    @property
    def bytes_per_second(self) -> float | None:
        return self._bytes_per_second

    def answered(self, seconds: float) -> None:
        """A question was answered."""
        with self._mutex:
            self._round_trip_ms = moving(self._round_trip_ms, seconds * 1e3)
            self._answered_at = self._seconds()

    def moved(self, nbytes: int, seconds: float) -> None:
        """So many bytes came, in ``seconds`` from the question to the last of them."""
        if nbytes < LEAST_BYTES:
            return
        with self._mutex:
            seconds = max(seconds - (self._round_trip_ms or 0.0) / 1e3, seconds / 4, 1e-6)
            self._bytes_per_second = moving(self._bytes_per_second, nbytes / seconds)
            self._moved_at = self._seconds()

    def load_ms(self, nbytes: int) -> float | None:
        """About how long ``nbytes`` take; None while that is not known, or no longer."""
        with self._mutex:
            if self._bytes_per_second is None or self._round_trip_ms is None:
                return None
            if self._seconds() - self._moved_at > STALE_SECONDS:
                return None
            return self._round_trip_ms + nbytes / max(self._bytes_per_second, 1.0) * 1e3

    def worth_asking(self, worth_ms: float | None) -> bool:
        """Whether an answer comes before ``worth_ms`` have passed, as far as that is known."""
        with self._mutex:
            if self._round_trip_ms is None or worth_ms is None:
                return True
            stale = self._seconds() - self._answered_at > STALE_SECONDS
            return stale or self._round_trip_ms < worth_ms


def moving(average: float | None, newest: float) -> float:
    return newest if average is None else average + NEWEST * (newest - average)


def worth_loading(load_ms: float | None, compute_ms: float | None, tokens: int) -> bool:
    """Whether to load ``tokens`` rather than compute them. What is not known is measured by
    doing it."""
    if load_ms is None:
        return True
    if compute_ms is None:
        return load_ms < FELT_MS or tokens > MEASURING_TOKENS
    return load_ms < compute_ms
