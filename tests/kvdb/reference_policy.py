"""Which blocks to keep: two LRU queues whose victims are compared by age, with a learned ratio.

A block seen once is `cold`, seen again it is `hot`; a hot leaf may grow `age_ratio` times as old as
a cold one before it goes. The ratio is the one adaptive number. Evicted rows stay as history, and a
miss that finds one says that its queue was cut too short: the ratio moves by a step over the size
of that queue's history, so it rests where one more row of either would save as many hits.

Sources: two queues, history and the step over its size are ARC's (Megiddo and Modha, FAST'03),
here with ages in place of sizes; promotion on the second uncorrelated reference and history that
outlives the block are LRU-2's (O'Neil, O'Neil and Weikum, SIGMOD'93); equal marginal hit rates as
the place to rest follow LHD (Beckmann, Chen and Cidon, NSDI'18). At ratio 1 this is LRU, at
infinity cold goes first.

The reference over dicts, written apart from the SQL of `kvdb/retention.py`, which does the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Queue = Literal["cold", "hot"]
State = Literal["live", "evicted"]

ONE: Final = 1 << 20  # age_ratio is fixed-point, so that it fits an INTEGER counter
RATIO_START: Final = 2 * ONE
RATIO_MIN: Final = ONE  # below 1 a parent could be older than its child allows: see `_older`
RATIO_MAX: Final = 256 * ONE
STEP_UP: Final = 3  # a hit in hot history, over the number of hot history rows
STEP_DOWN: Final = 2  # a hit in cold history; smaller, since a wrong low ratio costs more hits
STEP_CAP: Final = 5  # one hit moves the ratio by at most a fifth
FLOOR: Final = 16  # a history shorter than live / 16 counts as that long
COLD_FLOOR: Final = 32  # cold keeps live / 32, or a loop over hot blocks lets no newcomer stay
NEAR: Final = 3  # hot history older than 3 times the oldest hot leaf is out of reach: no step
HISTORY: Final = 2  # history rows per live row, at most


@dataclass(slots=True)
class Row:
    """The columns of `blocks` that retention reads and writes."""

    id: int
    key: Hashable
    parent: Row | None
    depth: int
    last_access: int
    prev_access: int  # first reference of the current touch window
    state: State = "live"
    queue: Queue = "cold"
    refs: int = 0  # live children, and running requests whose deepest hit it is
    hits: int = 0


_Entry = tuple[int, int, int]  # last_access, -depth, id: a victims or history index


@dataclass(slots=True)
class _Index:
    """An ordered partial index; entries that no longer match are dropped when they surface."""

    state: State
    queue: Queue
    heap: list[_Entry] = field(default_factory=list)

    def add(self, row: Row) -> None:
        heapq.heappush(self.heap, (row.last_access, -row.depth, row.id))

    def oldest(self, rows: dict[int, Row]) -> Row | None:
        """The first row `WHERE refs = 0 AND state = ? AND queue = ?`, least recent, deepest."""
        while self.heap:
            last_access, _, row_id = self.heap[0]
            row = rows.get(row_id)
            if (
                row is not None
                and row.refs == 0
                and row.state == self.state
                and row.queue == self.queue
                and row.last_access == last_access
            ):
                return row
            heapq.heappop(self.heap)
        return None


class Retention:
    """Decides hits, promotions and victims for a store of `capacity` blocks.

    :param capacity: live blocks at most
    :param window: references less than so many ticks after the first of a window count once
    """

    def __init__(self, capacity: int, window: int = 1) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self.capacity = capacity
        self.window = window
        self.tick = 0
        self.age_ratio = RATIO_START
        self.rows: dict[int, Row] = {}
        self.by_key: dict[Hashable, Row] = {}
        self.count: dict[tuple[State, Queue], int] = {
            (state, queue): 0 for state in ("live", "evicted") for queue in ("cold", "hot")
        }
        self._index = {(s, q): _Index(s, q) for s, q in self.count}
        self._next_id = 0

    @property
    def live(self) -> int:
        return self.count["live", "cold"] + self.count["live", "hot"]

    @property
    def history(self) -> int:
        return self.count["evicted", "cold"] + self.count["evicted", "hot"]

    def request(self, chain: Sequence[Hashable]) -> int:
        """Look up a chain, root first, store what it misses, and return how many blocks hit.

        Order matters: touch the hits, learn from the history, evict in one batch, insert, trim.
        """
        self.tick += 1
        tip: Row | None = None
        hits = 0
        for key in chain:
            row = self.by_key.get(key)
            if row is None or row.state != "live":
                break
            self._touch(row)
            tip = row
            hits += 1
        missing = chain[hits:]
        if tip is not None:
            tip.refs += 1  # the request holds its deepest hit, and with it every ancestor
        for key in missing:
            ghost = self.by_key.get(key)
            if ghost is not None:
                self._learn(ghost)
        self.evict(self.live + len(missing) - self.capacity)
        parent = tip
        for key in missing[: max(0, self.capacity - self.live)]:
            parent = self._insert(key, parent)
        if tip is not None:
            self._release(tip)
        self._trim()
        return hits

    def evict(self, blocks: int) -> int:
        """Evict up to so many leaves, worst first; an emptied parent is a leaf for the next."""
        for done in range(blocks):
            row = self._older("live", 1)
            if row is None:
                return done
            self._move(row, "evicted", row.queue)
            if row.parent is not None:
                self._release(row.parent)
        return max(blocks, 0)

    def _touch(self, row: Row) -> None:
        """Count a reference; the second one outside the window makes the row hot."""
        row.last_access = self.tick
        if self.tick - row.prev_access >= self.window:
            row.prev_access = self.tick
            row.hits += 1
            self._move(row, row.state, "hot")
        elif row.refs == 0:
            self._index[row.state, row.queue].add(row)

    def _insert(self, key: Hashable, parent: Row | None) -> Row:
        """Store a block as cold, or take up its history row where that left off."""
        row = self.by_key.get(key)
        if row is None:
            depth = 0 if parent is None else parent.depth + 1
            row = Row(self._next_id, key, parent, depth, self.tick, self.tick)
            self._next_id += 1
            self.rows[row.id] = row
            self.by_key[key] = row
            self.count["live", "cold"] += 1
            self._index["live", "cold"].add(row)
        else:
            self._move(row, "live", row.queue)
            self._touch(row)
        if parent is not None:
            parent.refs += 1
        return row

    def _learn(self, ghost: Row) -> None:
        """Move the ratio for a miss on a history row: up if hot was cut short, down if cold."""
        if self.tick - ghost.prev_access < self.window:
            return
        if ghost.queue == "hot":
            hot = self._index["live", "hot"].oldest(self.rows)
            if self._cold_is_least() or (
                hot is not None
                and self.tick - ghost.last_access > NEAR * (self.tick - hot.last_access)
            ):
                return
        rows = max(self.count["evicted", ghost.queue], self.live // FLOOR, 1)
        step = STEP_UP if ghost.queue == "hot" else STEP_DOWN
        change = max(1, min(self.age_ratio * step // rows, self.age_ratio // STEP_CAP))
        ratio = self.age_ratio + (change if ghost.queue == "hot" else -change)
        self.age_ratio = min(max(ratio, RATIO_MIN), RATIO_MAX)

    def _older(self, state: State, power: Literal[1, 2]) -> Row | None:
        """The worse of the oldest cold and the oldest hot row.

        Hot is worse when (age of hot / age of cold) ** power exceeds the ratio. A ratio of at least
        1 keeps trees whole: whoever touches a child touches its parent, so the parent is as young
        and as hot, and never goes first.
        """
        cold = self._index[state, "cold"].oldest(self.rows)
        hot = self._index[state, "hot"].oldest(self.rows)
        if cold is None or hot is None:
            return cold or hot
        if state == "live" and self._cold_is_least():
            return hot
        cold_age = (self.tick - cold.last_access) ** power
        hot_age = (self.tick - hot.last_access) ** power
        return hot if hot_age * ONE > cold_age * self.age_ratio else cold

    def _cold_is_least(self) -> bool:
        return self.count["live", "cold"] * COLD_FLOOR <= self.live

    def _trim(self) -> None:
        """Forget the oldest history, by the root of the ratio: else hot crowds out cold."""
        while self.history > HISTORY * self.live:
            row = self._older("evicted", 2)
            if row is None:
                return
            self.count["evicted", row.queue] -= 1
            del self.rows[row.id]
            del self.by_key[row.key]

    def _move(self, row: Row, state: State, queue: Queue) -> None:
        self.count[row.state, row.queue] -= 1
        self.count[state, queue] += 1
        row.state, row.queue = state, queue
        if row.refs == 0:
            self._index[state, queue].add(row)

    def _release(self, row: Row) -> None:
        row.refs -= 1
        if row.refs == 0:
            self._index[row.state, row.queue].add(row)
