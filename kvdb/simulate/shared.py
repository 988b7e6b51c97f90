"""What the remote of a fleet holds: since when a block can be read there."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from math import inf
from typing import Protocol


class Shared(Protocol):
    """``nbytes`` bytes in ``rows`` blocks. Blocks are numbers; times are in seconds."""

    nbytes: int

    @property
    def rows(self) -> int:
        """How many blocks."""

    def has(self, block: int, at: float) -> bool:
        """Whether it can be read at that time."""

    def read(self, block: int) -> None:
        """It is read: where room is short that keeps it."""

    def put(self, block: int, nbytes: int, visible_at: float) -> None:
        """It was sent, and can be read from ``visible_at``."""


class Unlimited:
    """Room for everything."""

    def __init__(self, blocks: int) -> None:
        self.rows = self.nbytes = 0
        self._visible_at = array("d", [inf]) * blocks

    def has(self, block: int, at: float) -> bool:
        return self._visible_at[block] <= at

    def read(self, block: int) -> None:
        """Nothing to note."""

    def put(self, block: int, nbytes: int, visible_at: float) -> None:
        if self._visible_at[block] == inf:
            self.rows += 1
            self.nbytes += nbytes
        self._visible_at[block] = min(self._visible_at[block], visible_at)


class Limited:
    """At most ``capacity`` bytes, of which the least recently written or read object goes first: it
    knows nothing of trees, as Redis does not."""

    def __init__(self, capacity: int) -> None:
        self.nbytes = 0
        self._capacity = capacity
        self._objects: OrderedDict[int, tuple[float, int]] = OrderedDict()

    @property
    def rows(self) -> int:
        return len(self._objects)

    def has(self, block: int, at: float) -> bool:
        held = self._objects.get(block)
        return held is not None and held[0] <= at

    def read(self, block: int) -> None:
        self._objects.move_to_end(block)

    def put(self, block: int, nbytes: int, visible_at: float) -> None:
        held = self._objects.pop(block, None)
        if held is not None:
            self.nbytes -= held[1]
            visible_at = min(visible_at, held[0])
        self._objects[block] = (visible_at, nbytes)
        self.nbytes += nbytes
        while self.nbytes > self._capacity:
            self.nbytes -= self._objects.popitem(last=False)[1][1]
