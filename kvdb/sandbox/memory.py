"""How much memory a statement may take: SQLite's part, and the process's."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvdb.driver import sqlite3

MEMORY_BYTES = 256 << 20
LEAST_GROWTH_BYTES = 32 << 20
STATUS = Path("/proc/self/status")


def cap_process_memory(nbytes: int) -> None:
    """Let SQLite use at most half of ``nbytes`` in this process, in every connection, until it
    ends; the other half is for Python's copy of the rows.

    SQLite lowers this limit but never raises it again: only for a program that lives for this.
    """
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute(f"PRAGMA hard_heap_limit = {int(nbytes) // 2}")
    finally:
        connection.close()


@contextmanager
def bounded_memory(nbytes: int) -> Iterator[None]:
    """Inside, this process grows to about ``nbytes`` of resident memory at most: beyond it
    allocations fail with MemoryError. Where the kernel does not tell or enforce it (macOS), only
    :func:`cap_process_memory` holds."""
    used = _used()
    if used is None:
        yield
        return
    data, resident = used
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = data + max(nbytes - resident, LEAST_GROWTH_BYTES)
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def unbounded_memory() -> Iterator[None]:
    """Inside, :func:`bounded_memory` does not count: for what the program itself loads while a
    statement runs."""
    before = _used()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if before is None or soft == hard:
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        grown = max(0, (_used() or before)[0] - before[0])
        resource.setrlimit(resource.RLIMIT_DATA, (soft + grown, hard))


def _used() -> tuple[int, int] | None:
    """(private memory mapped, resident memory) of this process in bytes, on Linux."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    kilobytes = {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in lines)
        if name in ("VmData", "VmRSS")
    }
    return kilobytes["VmData"] << 10, kilobytes["VmRSS"] << 10
