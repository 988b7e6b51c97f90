"""When a remote is asked: not for some time after it failed, longer each time."""

from __future__ import annotations

import threading
from collections.abc import Callable

FIRST_SECONDS, MOST_SECONDS = 1.0, 60.0
JITTER = 0.25
# So many late answers in a row are a failure.
LATE_IN_A_ROW = 3


class Breaker:
    """After a failure the remote is down for 1, 2, 4 … 60 seconds, and up to a quarter more, so
    that many machines do not come back at once; then one call may try. ``seconds`` is a monotonic
    clock, ``jitter`` gives numbers from 0 to 1."""

    def __init__(self, seconds: Callable[[], float], jitter: Callable[[], float]) -> None:
        self._seconds = seconds
        self._jitter = jitter
        self._failures = 0
        self._late = 0
        self._until = 0.0
        self._trying_until = 0.0
        self._mutex = threading.Lock()

    def allows(self, seconds: float = 0.0) -> bool:
        """Whether a call may be made now. Of a remote that was down the first one only, for as
        long as it may take: ``seconds``."""
        with self._mutex:
            now = self._seconds()
            if not self._failures:
                return True
            if now < self._until or now < self._trying_until:
                return False
            self._trying_until = now + seconds
            return True

    @property
    def down_seconds(self) -> float:
        """How much longer it is down; 0 when it is not."""
        with self._mutex:
            return max(0.0, self._until - self._seconds()) if self._failures else 0.0

    def succeeded(self) -> None:
        with self._mutex:
            self._failures = self._late = 0

    def failed(self) -> None:
        with self._mutex:
            self._fail()

    def late(self) -> None:
        """An answer did not come in time. One that is being tried again has failed by that."""
        with self._mutex:
            self._late += 1
            if self._failures or self._late >= LATE_IN_A_ROW:
                self._fail()

    def _fail(self) -> None:
        self._late = 0
        self._trying_until = 0.0
        down = min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(self._failures, 10))
        self._failures += 1
        self._until = self._seconds() + down * (1 + JITTER * self._jitter())
