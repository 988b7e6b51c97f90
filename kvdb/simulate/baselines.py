"""Known policies under prefix semantics, to measure kvdb's own against.

A block hits only if all blocks before it hit, only leaves may go, and blocks of the running request
stay. The published policies know no trees; here each gives its worst *leaf*, and where blocks rank
alike the deeper one goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from math import inf

from kvdb.simulate.trace import Trace

COLD, HOT = 0, 1  # ARC's T1 and T2, S3-FIFO's S and M


class Baseline:
    """What all share: who is resident, and leaves in the order of a rank that the policy sets.

    A policy says with :meth:`touch` and :meth:`insert` what a hit and a new block rank, and may
    choose among its queues in :meth:`victim`.
    """

    def __init__(self, trace: Trace, capacity: int) -> None:
        self.capacity = capacity
        self.parents, self.depths = trace.parents, trace.depths
        blocks = trace.blocks
        self.tick = 0
        self.resident = bytearray(blocks)
        self.children = [0] * blocks
        self.running = [0] * blocks  # the last request that a block was part of
        self.queue = bytearray(blocks)
        self.rank: list[float] = [0] * blocks
        self.sizes = [0, 0]
        # Entries that no longer hold are dropped when they surface.
        self._leaves: tuple[list[tuple[float, int, int]], ...] = ([], [])

    def request(self, chain: Sequence[int]) -> int:
        """Look a chain up, store what is missing, and return how many blocks hit."""
        self.tick += 1
        for block in chain:
            self.running[block] = self.tick
        hits = 0
        for block in chain:
            if not self.resident[block]:
                break
            self.touch(block)
            hits += 1
        tip = chain[hits - 1] if hits else -1
        for block in chain[hits:]:
            known = self.recall(block)
            if not self._make_room():
                break
            self.insert(block, known)
            self.resident[block] = 1
            self.sizes[self.queue[block]] += 1
            if tip >= 0:
                self.children[tip] += 1
            tip = block
        if tip >= 0 and not self.children[tip]:
            self.push(tip)
        return hits

    def close(self) -> None:
        """Nothing to close."""

    # -- what a policy is ---------------------------------------------------------------------

    def touch(self, block: int) -> None:
        raise NotImplementedError

    def recall(self, block: int) -> bool:
        """True if a missing block was resident before and is remembered; it is no longer then."""
        return False

    def insert(self, block: int, known: bool) -> None:
        raise NotImplementedError

    def victim(self) -> int | None:
        return self.oldest(COLD)

    def evicted(self, block: int) -> None:
        """Called when a block has gone."""

    # -- what it is made of -------------------------------------------------------------------

    def oldest(self, queue: int) -> int | None:
        """The evictable leaf of least rank, the deepest of equals."""
        leaves = self._leaves[queue]
        while leaves:
            rank, _, block = leaves[0]
            if (
                self.resident[block]
                and not self.children[block]
                and self.queue[block] == queue
                and self.rank[block] == rank
                and self.running[block] != self.tick
            ):
                return block
            heapq.heappop(leaves)
        return None

    def either(self, first: int) -> int | None:
        """The oldest of a queue, or of the other one where it has none."""
        block = self.oldest(first)
        return self.oldest(1 - first) if block is None else block

    def push(self, block: int) -> None:
        heapq.heappush(
            self._leaves[self.queue[block]], (self.rank[block], -self.depths[block], block)
        )

    def move(self, block: int, queue: int) -> None:
        self.sizes[self.queue[block]] -= 1
        self.queue[block] = queue
        self.sizes[queue] += 1

    def _make_room(self) -> bool:
        while self.sizes[COLD] + self.sizes[HOT] >= self.capacity:
            block = self.victim()
            if block is None:
                return False
            self.resident[block] = 0
            self.sizes[self.queue[block]] -= 1
            parent = self.parents[block]
            if parent >= 0:
                self.children[parent] -= 1
                if not self.children[parent] and self.running[parent] != self.tick:
                    self.push(parent)
            self.evicted(block)
        return True


class Lru(Baseline):
    """Least recently used."""

    def touch(self, block: int) -> None:
        self.rank[block] = self.tick

    def insert(self, block: int, known: bool) -> None:
        self.rank[block] = self.tick


class Lru2(Baseline):
    """LRU-2 (O'Neil et al., SIGMOD 1993): the oldest penultimate reference goes first, those with
    one reference before all others. Evicted blocks are remembered, twice the capacity."""

    HISTORY = 2

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self.last = [0] * trace.blocks
        self.ghosts: dict[int, None] = {}  # in the order of eviction

    def touch(self, block: int) -> None:
        self.move(block, HOT)
        self.rank[block] = self.last[block]
        self.last[block] = self.tick

    def recall(self, block: int) -> bool:
        return self.ghosts.pop(block, self) is None

    def insert(self, block: int, known: bool) -> None:
        self.queue[block] = HOT if known else COLD
        self.rank[block] = self.last[block] if known else self.tick
        self.last[block] = self.tick

    def victim(self) -> int | None:
        return self.either(COLD)

    def evicted(self, block: int) -> None:
        self.ghosts[block] = None
        while len(self.ghosts) > self.HISTORY * self.capacity:
            del self.ghosts[next(iter(self.ghosts))]


class Arc(Baseline):
    """ARC (Megiddo and Modha, FAST 2003): blocks seen once and again, each with a history, and a
    target for the first that hits in the histories move."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self.target = 0.0
        self.ghosts: tuple[dict[int, None], dict[int, None]] = ({}, {})

    def touch(self, block: int) -> None:
        self.move(block, HOT)
        self.rank[block] = self.tick

    def recall(self, block: int) -> bool:
        once, again = len(self.ghosts[COLD]), len(self.ghosts[HOT])
        if block in self.ghosts[COLD]:
            self.target = min(self.capacity, self.target + max(1.0, again / once))
            del self.ghosts[COLD][block]
        elif block in self.ghosts[HOT]:
            self.target = max(0.0, self.target - max(1.0, once / again))
            del self.ghosts[HOT][block]
        else:
            return False
        return True

    def insert(self, block: int, known: bool) -> None:
        self.queue[block] = HOT if known else COLD
        self.rank[block] = self.tick

    def victim(self) -> int | None:
        return self.either(COLD if self.sizes[COLD] >= max(1.0, self.target) else HOT)

    def evicted(self, block: int) -> None:
        self.ghosts[self.queue[block]][block] = None
        once, again = self.ghosts
        while once and self.sizes[COLD] + len(once) > self.capacity:
            del once[next(iter(once))]
        while len(once) + len(again) > self.capacity:
            longest = again or once
            del longest[next(iter(longest))]


class S3Fifo(Baseline):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue of a tenth that lets only blocks touched
    more than once into the main one, which goes round; what left the small one is remembered."""

    SMALL = 0.1
    GHOSTS = 0.9
    MOST = 3
    PROMOTE = 2

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self.uses = bytearray(trace.blocks)
        self.order = 0
        self.ghosts: dict[int, None] = {}

    def touch(self, block: int) -> None:
        self.uses[block] = min(self.uses[block] + 1, self.MOST)

    def recall(self, block: int) -> bool:
        return self.ghosts.pop(block, self) is None

    def insert(self, block: int, known: bool) -> None:
        self.queue[block] = HOT if known else COLD
        self.uses[block] = 0
        self._to_end(block)

    def victim(self) -> int | None:
        while True:
            small, main = self.oldest(COLD), self.oldest(HOT)
            if small is not None and (
                main is None or self.sizes[COLD] > self.SMALL * self.capacity
            ):
                if self.uses[small] < self.PROMOTE:
                    return small
                self.uses[small] = 0
                self.move(small, HOT)
                self._to_end(small)
                self.push(small)
            elif main is not None and self.uses[main]:
                self.uses[main] -= 1
                self._to_end(main)
                self.push(main)
            else:
                return main

    def evicted(self, block: int) -> None:
        if self.queue[block] == COLD:
            self.ghosts[block] = None
            if len(self.ghosts) > self.GHOSTS * self.capacity:
                del self.ghosts[next(iter(self.ghosts))]

    def _to_end(self, block: int) -> None:
        self.order += 1
        self.rank[block] = self.order


class Sieve(Baseline):
    """SIEVE (Zhang et al., NSDI 2024): a hand goes from old to new over blocks that never move,
    clears the mark of touched ones and evicts the first without. It passes blocks that are no
    leaves."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self.visited = bytearray(trace.blocks)
        self.order: list[int] = []  # oldest first; -1 where one has gone
        self.place = [0] * trace.blocks
        self.hand = 0

    def touch(self, block: int) -> None:
        self.visited[block] = 1

    def insert(self, block: int, known: bool) -> None:
        self.visited[block] = 0
        if len(self.order) > 2 * self.capacity + 1024:
            self._close_gaps()
        self.place[block] = len(self.order)
        self.order.append(block)

    def victim(self) -> int | None:
        for _ in range(2 * len(self.order)):
            block = self.order[self.hand]
            # Past the newest it is at the oldest again, not at what comes next.
            self.hand = (self.hand + 1) % len(self.order)
            if block < 0 or self.children[block] or self.running[block] == self.tick:
                continue
            if not self.visited[block]:
                return block
            self.visited[block] = 0
        return None

    def evicted(self, block: int) -> None:
        self.order[self.place[block]] = -1

    def push(self, block: int) -> None:
        """The hand finds leaves itself."""

    def _close_gaps(self) -> None:
        self.hand -= self.order[: self.hand].count(-1)
        self.order = [block for block in self.order if block >= 0]
        self.hand %= max(len(self.order), 1)
        for place, block in enumerate(self.order):
            self.place[block] = place


class LfuDa(Baseline):
    """LFU with dynamic ageing (Arlitt et al., 2000): references plus the rank of the last victim;
    the least recently used of equals goes first."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self.references = [0] * trace.blocks
        self.age = 0
        self.scale = len(trace.requests) + 1

    def touch(self, block: int) -> None:
        self.references[block] += 1
        self._set_rank(block)

    def insert(self, block: int, known: bool) -> None:
        self.references[block] = 1
        self._set_rank(block)

    def _set_rank(self, block: int) -> None:
        self.rank[block] = (self.age + self.references[block]) * self.scale + self.tick

    def victim(self) -> int | None:
        block = self.oldest(COLD)
        if block is not None:
            self.age = int(self.rank[block]) // self.scale
        return block


class Belady:
    """The optimum (Belady, 1966): of all blocks at hand those stay whose next use is nearest.

    A block is never used before its ancestors, so what stays is always a tree, and prefix
    semantics cost nothing: no policy that sees one request after the other can hit more.
    """

    def __init__(self, trace: Trace, capacity: int) -> None:
        self.capacity = capacity
        self.depths = trace.depths
        self.next_use: list[float] = [inf] * trace.blocks  # inf: never, and not resident
        self.resident = 0
        self._farthest: list[tuple[float, int, int]] = []
        self._request = 0
        self._later: list[list[float]] = []  # for each request, the next use of its blocks
        later: list[float] = [inf] * trace.blocks
        for number in range(len(trace.requests) - 1, -1, -1):
            chain, counted = trace.requests[number]
            self._later.append([later[block] for block in chain])
            for block in chain[:counted]:
                later[block] = number
        self._later.reverse()

    def request(self, chain: Sequence[int]) -> int:
        """The next request of the trace: hits are counted, and the nearest blocks stay."""
        hits = 0
        for block in chain:
            if self.next_use[block] == inf:
                break
            hits += 1
        for block, use in zip(chain, self._later[self._request], strict=True):
            self.resident += (use < inf) - (self.next_use[block] < inf)
            self.next_use[block] = use
            if use < inf:
                heapq.heappush(self._farthest, (-use, -self.depths[block], block))
        while self.resident > self.capacity:
            use, _, block = heapq.heappop(self._farthest)
            if self.next_use[block] == -use:
                self.next_use[block] = inf
                self.resident -= 1
        self._request += 1
        return hits

    def close(self) -> None:
        """Nothing to close."""


BASELINES: Mapping[str, Callable[[Trace, int], Baseline | Belady]] = {
    "lru": Lru,
    "lru-2": Lru2,
    "arc": Arc,
    "s3-fifo": S3Fifo,
    "sieve": Sieve,
    "lfu-da": LfuDa,
    "belady": Belady,
}
