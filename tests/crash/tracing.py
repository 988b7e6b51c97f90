"""strace on one thread of a worker: its calls, and a fault at one of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.crash.zygote import Worker

# Calls that change a file, a folder or a lock.
CHANGES = (
    "openat,write,writev,pwrite64,pwritev,fsync,fdatasync,ftruncate,fallocate,rename,renameat,"
    "renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat,chmod,fchmod,fchmodat,flock,fcntl"
)
READS = "pread64,preadv"

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None,
    reason="NOT PROVEN: strace is missing, so nothing dies or fails at a system call",
)

Point = tuple[str, int]  # a system call and which one of its kind, from 1 on


@contextmanager
def traced(worker: Worker, thread: int, *options: str) -> Iterator[None]:
    """strace is attached to one thread when the body runs; it ends with the worker."""
    process = subprocess.Popen(
        ["strace", *options, "-p", str(thread)],  # noqa: S607
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = []
    while "attached" not in (line := process.stderr.readline()):
        seen.append(line)
        assert line, f"strace does not attach: {seen}"
    try:
        yield
    finally:
        process.terminate()
        process.communicate(timeout=20)


def thread_of(lines: list[str], name: str) -> int:
    """The id of a worker's thread among the lines before ``ready``."""
    threads = {line.split()[1]: int(line.split()[2]) for line in lines if line.startswith("thread")}
    return threads[name]


def points(log: Path) -> list[Point]:
    """Every call of a strace log, in order."""
    counts: Counter[str] = Counter()
    found = []
    for line in log.read_text(errors="replace").splitlines():
        call = re.match(r"(?:\d+ +)?(\w+)\(", line)
        if call is not None:
            counts[call[1]] += 1
            found.append((call[1], counts[call[1]]))
    return found
