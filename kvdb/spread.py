"""A few threads for work that leaves the interpreter's lock: reading, verifying, decoding."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")
R = TypeVar("R")
MAX_WORKERS = 4
# Fewer items are done by the caller: handing them over would cost more than it brings.
SPREAD_FROM = 3


class Spreader:
    """Maps a function over items in up to four threads, made on first use."""

    def __init__(self, workers: int | None = None) -> None:
        self._workers = min(MAX_WORKERS, os.cpu_count() or 1) if workers is None else workers
        self._pool: ThreadPoolExecutor | None = None
        self._mutex = threading.Lock()

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterable[R]:
        """Results in the order of ``items``; the first exception is raised."""
        if self._workers < 2 or len(items) < SPREAD_FROM:
            return map(function, items)
        with self._mutex:
            if self._pool is None:
                from concurrent.futures import ThreadPoolExecutor

                self._pool = ThreadPoolExecutor(self._workers, "kvdb-reader")
            pool = self._pool
        return pool.map(function, items)

    def close(self) -> None:
        with self._mutex:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
