"""A few threads for work that leaves the interpreter's lock: reading, verifying, decoding."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

T = TypeVar("T")
R = TypeVar("R")
MAX_WORKERS = 4
# Fewer items are done by the caller: handing them over would cost more than it brings.
SPREAD_FROM = 3


class Spreader:
    """Maps a function over items in a few threads, made on first use."""

    def __init__(self, workers: int = MAX_WORKERS) -> None:
        self._workers = workers
        self._pool: ThreadPoolExecutor | None = None
        self._mutex = threading.Lock()

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterable[R]:
        """Results in the order of ``items``; the first exception is raised."""
        if self._workers < 2 or len(items) < SPREAD_FROM:
            return map(function, items)
        return self._threads().map(function, items)

    def stream(self, function: Callable[[T], R], items: Sequence[T], ahead: int) -> Iterator[R]:
        """Results in the order of ``items`` while later ones are worked on: one in every thread,
        and at most ``ahead`` finished ones waiting. Closing it waits for those under way."""
        pool, window = self._threads(), self._workers + ahead
        running: deque[Future[R]] = deque()
        left = iter(items)
        try:
            running.extend(pool.submit(function, item) for item in islice(left, window))
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(function, item) for item in islice(left, 1))
        finally:
            for future in running:
                if not future.cancel():
                    future.exception()

    def _threads(self) -> ThreadPoolExecutor:
        with self._mutex:
            if self._pool is None:
                from concurrent.futures import ThreadPoolExecutor

                self._pool = ThreadPoolExecutor(self._workers, "kvdb-reader")
            return self._pool

    def close(self) -> None:
        with self._mutex:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
