"""Two pieces of memory, used in turn: while one is written out, the next bytes go into the other.

Fresh memory costs a page fault for every 4 KiB, which is more than a block's bytes cost otherwise.
"""

from __future__ import annotations

import numpy as np

from kvdb.shards import Bytes

ALIGNMENT = 64


class Arenas:
    """See the module. What was given stays valid until :meth:`swap` was called twice."""

    def __init__(self) -> None:
        self._arenas = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._current = 0
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes of the current arena that are kept."""
        return self._used

    def room(self, nbytes: int) -> Bytes:
        """The next ``nbytes`` of the current arena; given again until :meth:`keep` is called."""
        arena = self._arenas[self._current]
        if self._used + nbytes > len(arena):
            # Whoever holds views of the old memory keeps it alive.
            arena = self._arenas[self._current] = np.empty(self._used + nbytes, np.uint8)
        return arena[self._used : self._used + nbytes]

    def reserve(self, nbytes: int) -> None:
        """Make the current arena at least so large, while it is unused."""
        if not self._used and len(self._arenas[self._current]) < nbytes:
            self._arenas[self._current] = np.empty(nbytes, np.uint8)

    def keep(self, nbytes: int) -> None:
        """Keep the last ``nbytes`` given."""
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT

    def take(self, nbytes: int) -> Bytes:
        """:meth:`room`, kept."""
        given = self.room(nbytes)
        self.keep(nbytes)
        return given

    def swap(self) -> None:
        """Go on in the other arena, from its start."""
        self._current = 1 - self._current
        self._used = 0
