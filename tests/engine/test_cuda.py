"""Host memory that a driver locks, lent and taken back; the driver's calls are injected."""

from __future__ import annotations

import ctypes
from typing import Any

from engine.cuda import Recycled


class Memory:
    """Locks pages of ordinary memory, and keeps account."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}
        self.full = False

    def allocate(self, nbytes: int) -> int | None:
        if self.full:
            return None
        memory = ctypes.create_string_buffer(nbytes)
        self.held[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address: int) -> None:
        del self.held[address]


def test_what_is_dropped_is_lent_again_and_what_is_seen_is_not() -> None:
    memory = Memory()
    recycled = Recycled(memory.allocate, memory.free, kept=300)
    first = recycled.lend(100)
    address = first.ctypes.data
    first[:] = 7
    part = first[10:20].view()
    del first
    other = recycled.lend(100)  # a view of the first is alive
    assert other.ctypes.data != address
    other[:] = 1
    assert part.tolist() == [7] * 10
    del part
    assert recycled.lend(50).ctypes.data != address
    assert recycled.lend(100).ctypes.data == address


def test_no_more_is_kept_than_asked_and_none_is_needed() -> None:
    memory = Memory()
    recycled = Recycled(memory.allocate, memory.free, kept=300)
    lent = [recycled.lend(100) for _ in range(5)]
    assert len(memory.held) == 5
    lent.clear()
    assert len(memory.held) == 3
    memory.full = True
    again = [recycled.lend(100) for _ in range(4)]
    assert len(memory.held) == 3
    assert len({array.ctypes.data for array in again}) == 4
    again[3][:] = 1  # ordinary memory
