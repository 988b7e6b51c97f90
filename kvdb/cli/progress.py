"""Progress of long work on stderr: nothing for a second, then one line that is rewritten on a
terminal, and a new line every few seconds elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_SECONDS = 1.0
LINE_SECONDS = 5.0
TERMINAL_SECONDS = 0.1

Report = Callable[[int, int], None]


@contextmanager
def progress(label: str, describe: Callable[[int], str] = str) -> Iterator[Report]:
    """Give a function to call with (done, total); total 0 means it is not known."""
    stream = sys.stderr
    terminal = stream.isatty()
    shown = False
    due = time.monotonic() + QUIET_SECONDS

    def report(done: int, total: int) -> None:
        nonlocal due, shown
        now = time.monotonic()
        if now < due:
            return
        due = now + (TERMINAL_SECONDS if terminal else LINE_SECONDS)
        amount = f"{describe(done)} of {describe(total)}" if total else describe(done)
        if terminal:
            # A line that wraps could not be cleared again.
            width = shutil.get_terminal_size().columns - 1
            stream.write(f"\r\x1b[K{f'{label}: {amount}'[:width]}")
            shown = True
        else:
            stream.write(f"{label}: {amount}\n")
        stream.flush()

    try:
        yield report
    finally:
        if shown:
            stream.write("\r\x1b[K")
            stream.flush()
