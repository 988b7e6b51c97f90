"""Kernel locks: ``store.lock``, ``writer.lock`` and ``processes/<uuid>.lock``.

All are flock on files that are never deleted while in use; a dead process drops its locks by
dying, so there are no pid files and no stale locks. One descriptor per holder, taken blocking:
the kernel queues waiters fairly, where polling starves.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvdb.errors import StoreClosed

Flock = Callable[[int, int], None]


class FileLock:
    """One flock on one file. Not reentrant; one object per holder."""

    def __init__(self, path: Path, *, flock: Flock = fcntl.flock) -> None:
        self.path = path
        self._flock = flock
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        return self._fd is not None

    def acquire(self, *, shared: bool = False, blocking: bool = True, create: bool = True) -> bool:
        """Take the lock; False when it is not free and ``blocking`` is False.

        Raises OSError when the file cannot be opened (a read-only folder, say).
        """
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        fd = os.open(self.path, flags, 0o600)
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            self._flock(fd, mode if blocking else mode | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if not blocking and error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class WriterLock:
    """``writer.lock``: every write transaction of every process takes it first.

    Threads of one process queue on a mutex, processes on the flock, so SQLite's own busy handler,
    which starves waiters, is never reached. The descriptor stays open: one system call a turn.
    """

    def __init__(self, path: Path, *, flock: Flock = fcntl.flock) -> None:
        self._flock = flock
        self._mutex = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self._mutex:
            if self._fd < 0:
                raise StoreClosed("This store object is closed.")
            self._flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                self._flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        with self._mutex:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def is_dead(path: Path) -> bool:
    """True when no process holds the lock file at ``path`` (or it is gone)."""
    if not path.exists():
        return True
    probe = FileLock(path)
    if not probe.acquire(blocking=False):
        return False
    probe.release()
    return True
