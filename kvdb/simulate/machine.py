"""One machine of a fleet: a local cache of blocks, a disk and a network card."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from kvdb.simulate.link import Link


class Machine:
    """The cache holds at most ``capacity`` blocks and gives up the least recently used leaf: a
    block counts as used after all that stand on it, so that what is held is always a tree.

    The value of a block is when it was computed or loaded. Requests that begin alike wait for it
    instead of computing it twice, as kvdb's scheduler lets them.
    """

    def __init__(self, capacity: int, disk_rate: float, network_rate: float) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, float] = OrderedDict()
        self.disk = Link(disk_rate)
        self.receiving = Link(network_rate)
        self.sending = Link(network_rate)
        self.prefill_seconds = 0.0
        self._unsent: deque[tuple[float, int]] = deque()
        self._unsent_bytes = 0

    def find(self, chain: Sequence[int]) -> int:
        """How many blocks from the root are here."""
        low, high = 0, len(chain)
        blocks = self.blocks
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def use(self, chain: Sequence[int], ready_at: float) -> None:
        """The blocks of a request are used now; those that were missing are here from
        ``ready_at``. Of a chain that does not fit the beginning is kept."""
        blocks, to_end = self.blocks, self.blocks.move_to_end
        for block in reversed(chain[: self.capacity]):
            if block in blocks:
                to_end(block)
            else:
                blocks[block] = ready_at
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)

    def unsent_bytes(self, at: float) -> int:
        """What waits to be written to the remote."""
        unsent = self._unsent
        while unsent and unsent[0][0] <= at:
            self._unsent_bytes -= unsent.popleft()[1]
        return self._unsent_bytes

    def queue(self, sent_at: float, nbytes: int) -> None:
        """Remember something that is being written to the remote until ``sent_at``."""
        self._unsent.append((sent_at, nbytes))
        self._unsent_bytes += nbytes
