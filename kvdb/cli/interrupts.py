"""^C while a statement runs: noted, not raised at whatever line Python is at."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def noted_interrupts(
    also: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[], bool]]:
    """Inside, SIGINT makes the yielded function return True and calls ``also``. For the main
    thread only."""
    seen = False

    def note(*_: object) -> None:
        nonlocal seen
        seen = True
        also()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)
