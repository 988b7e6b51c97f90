"""A file of no use but its size: on a full disk it is given up, so that a store can open and an
eviction can commit, which on a full disk needs room of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvdb.durable import FileSystem
from kvdb.errors import OutOfSpace, StoreUnavailable
from kvdb.limit import Limit

BALLAST_NAME = "ballast"
# The WAL frames of one eviction batch, and SQLite's shared-memory file.
BALLAST_BYTES = 1 << 20

T = TypeVar("T")


class Ballast:
    """The ballast of one store. All calls are quiet when the disk does not play along."""

    def __init__(self, limit: Limit, fs: FileSystem) -> None:
        self._path = limit.root / BALLAST_NAME
        self._limit = limit
        self._fs = fs

    def ensure(self) -> None:
        """Make it (again) where the disk has room to spare."""
        with contextlib.suppress(OSError):
            if self._whole() or not self._limit.disk_allows(BALLAST_BYTES):
                return
            self._fs.unlink(self._path)  # what a crash or a full disk left of one
            fd = self._fs.create(self._path)
            try:
                os.posix_fallocate(fd, 0, BALLAST_BYTES)
            except AttributeError:  # macOS has no such call
                os.write(fd, bytes(BALLAST_BYTES))
            finally:
                self._fs.close(fd)

    def _whole(self) -> bool:
        return self._path.exists() and self._path.stat().st_size >= BALLAST_BYTES

    def spend(self, action: Callable[[], T]) -> T:
        """See :func:`spend_ballast`."""
        return spend_ballast(self._path.parent, action)


def spend_ballast(root: Path, action: Callable[[], T]) -> T:
    """Run ``action``; where it finds no space, give the ballast up and run it once more."""
    try:
        return action()
    except (OutOfSpace, StoreUnavailable, OSError):
        try:
            (root / BALLAST_NAME).unlink()
        except OSError:
            pass
        else:
            return action()
        raise
