"""The RAM tier: decoded, verified parts of blocks within a byte budget, evicted by LRU-2.

It is a cache over published shards and nothing else: the index alone says what is stored, so an
entry that goes, or was never let in, is read from disk. A key names the block's hash (and so model,
layout and prefix), the part, and the checksum of its stored bytes, so an entry can never stand for
another file's, another namespace's or an exact twin's bytes. Values are never changed and are
copied into live caches, so neither aliases the other.
"""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from kvdb.reader import Bytes, Location

V = TypeVar("V")
# Evicted keys are remembered, so that a block's second use is known as one.
REMEMBERED = 4096
NEVER = -1


class PartKey(NamedTuple):
    """Content identity of one stored part."""

    hash: bytes
    part: str
    checksum: bytes

    @classmethod
    def of(cls, location: Location) -> PartKey:
        return cls(location.hash, location.part, location.checksum)


@dataclass(frozen=True, slots=True)
class RamStats:
    """Sizes in bytes; ``hits``, ``misses``, ``evictions`` and ``refused`` count parts. ``refused``
    were not worth what they would have pushed out."""

    budget: int
    nbytes: int
    entries: int
    hits: int
    misses: int
    hit_nbytes: int
    evictions: int
    refused: int


@dataclass(slots=True)
class _Entry(Generic[V]):
    """``last`` use and the one ``before`` it, in ticks."""

    value: V
    nbytes: int
    last: int
    before: int


class RamTier(Generic[V]):
    """Maps :class:`PartKey` to values of known size. Thread-safe; a budget of 0 holds nothing.

    Uses within one tick count once, and of equal ones the first stays: of a chain that does not
    fit, the front keeps hitting, where plain LRU would lose every block just before its use.
    """

    def __init__(self, budget: int = 0) -> None:
        self._budget = budget
        self._mutex = threading.Lock()
        self._entries: dict[PartKey, _Entry[V]] = {}
        # (before, last, key) of every entry, with stale ones left in until they come up.
        self._order: list[tuple[int, int, PartKey]] = []
        self._evicted: OrderedDict[PartKey, int] = OrderedDict()
        self._tick = 0
        self._nbytes = 0
        self._hits = self._misses = self._hit_nbytes = self._evictions = self._refused = 0

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def begin(self) -> None:
        """Another request: what it uses counts as one use, whatever the parts."""
        with self._mutex:
            self._tick += 1

    def get(self, key: PartKey) -> V | None:
        """The value, which counts as a use; not to be changed."""
        if not self._budget:
            return None
        with self._mutex:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            self._hit_nbytes += entry.nbytes
            if entry.last != self._tick:
                entry.before, entry.last = entry.last, self._tick
                self._enqueue(key, entry)
            return entry.value

    def __contains__(self, key: PartKey) -> bool:
        """Whether a value is held; no use of it."""
        return key in self._entries

    def wants(self, key: PartKey, nbytes: int) -> bool:
        """Whether :meth:`put` would keep a value, so that making it is worth a copy. A key that is
        not wanted counts as used."""
        if not 0 < nbytes <= self._budget:
            return False
        with self._mutex:
            if key in self._entries:
                return False
            if self._nbytes + nbytes <= self._budget:
                return True
            rank = self._rank(key)
            lowest = next(self._victims(), None)
            if lowest is not None and lowest[:2] < rank:
                return True
            self._refuse(key)
            return False

    def put(self, key: PartKey, value: V, nbytes: int) -> None:
        """Keep a value if it fits without pushing out any that was used more lately."""
        if not 0 < nbytes <= self._budget:
            return
        with self._mutex:
            if key in self._entries:
                return
            rank = self._rank(key)
            while self._nbytes + nbytes > self._budget:
                victim = next(self._victims(), None)
                if victim is None or victim[:2] >= rank:
                    self._refuse(key)
                    return
                self._evict(victim[2])
            self._evicted.pop(key, None)
            entry = _Entry(value, nbytes, rank[1], rank[0])
            self._entries[key] = entry
            self._nbytes += nbytes
            self._enqueue(key, entry)

    def resize(self, budget: int) -> int:
        """Set the budget in bytes; what does not fit goes. Returns the bytes given back."""
        with self._mutex:
            before, self._budget = self._nbytes, max(0, budget)
            while self._nbytes > self._budget:
                self._evict(next(self._victims())[2])
            return before - self._nbytes

    def clear(self) -> None:
        """Drop every value; the budget and the counters stay."""
        budget = self._budget
        self.resize(0)
        self._budget = budget

    def stats(self) -> RamStats:
        with self._mutex:
            return RamStats(
                self._budget,
                self._nbytes,
                len(self._entries),
                self._hits,
                self._misses,
                self._hit_nbytes,
                self._evictions,
                self._refused,
            )

    # -- with the mutex held -----------------------------------------------------------------

    def _rank(self, key: PartKey) -> tuple[int, int]:
        """(use before the last, last use) of a newcomer that is used now."""
        seen = self._evicted.get(key, NEVER)
        return (seen if seen != self._tick else NEVER), self._tick

    def _enqueue(self, key: PartKey, entry: _Entry[V]) -> None:
        heapq.heappush(self._order, (entry.before, entry.last, key))
        if len(self._order) > 64 + 4 * len(self._entries):
            self._order = [(e.before, e.last, k) for k, e in self._entries.items()]
            heapq.heapify(self._order)

    def _victims(self) -> Iterator[tuple[int, int, PartKey]]:
        """The next to go: seen once and longest ago first, then by the use before the last."""
        while self._order:
            before, last, key = self._order[0]
            entry = self._entries.get(key)
            if entry is not None and (entry.before, entry.last) == (before, last):
                yield before, last, key
            else:
                heapq.heappop(self._order)

    def _evict(self, key: PartKey) -> None:
        entry = self._entries.pop(key)
        self._nbytes -= entry.nbytes
        self._evictions += 1
        self._remember(key, entry.last)

    def _refuse(self, key: PartKey) -> None:
        self._refused += 1
        self._remember(key, self._tick)

    def _remember(self, key: PartKey, tick: int) -> None:
        self._evicted[key] = tick
        self._evicted.move_to_end(key)
        while len(self._evicted) > REMEMBERED:
            self._evicted.popitem(last=False)


def admit(tier: RamTier[Bytes], key: PartKey, raw: Bytes) -> None:
    """Let a part's raw bytes in, where the tier has a place for them. They can no longer be
    changed: whoever tries learns of it, and not the next reader."""
    raw.flags.writeable = False
    tier.put(key, raw, raw.nbytes)
