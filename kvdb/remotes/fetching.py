"""Gets objects of remotes: several at once, each checked, with bounded memory and time.

What fails is lost to this request, which computes it. A lane that hangs is left alone: what it may
get later is thrown away, and never written where a buffer was.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvdb.clock import Environment
from kvdb.errors import IntegrityError
from kvdb.members import Member
from kvdb.prefetch import Staging
from kvdb.reader import Bytes
from kvdb.remotes.filling import Filling
from kvdb.remotes.found import Found, ObjectName
from kvdb.remotes.packing import unpack
from kvdb.remotes.peer import FETCHING, Peer
from kvdb.remotes.remote import Get, Got, RemoteUnreachable
from kvdb.restore import Item

# Bytes that one lane asks for at once, or one object where that is larger: with what waits for its
# turn to be stored, all lanes of a remote stay within 64 MiB, or four blocks.
BATCH_BYTES = 16 << 20
LEAST_BATCH_BYTES = 1 << 20
# A remote that is slower than this counts as stuck.
SLOW_BYTES_PER_SECOND = 4 << 20
# A fetch may take so many times as long as was estimated, and this long where nothing was; never
# longer than computing would, but for the time in which a remote counts as stuck.
PATIENCE, MOST_SECONDS = 4.0, 60.0

# Whether a member may be used; "check": only after its build was compared with this one; "stop":
# no, and nothing else of what was asked for either.
Verdict = Literal["use", "refuse", "check", "stop"]
Deliver = Callable[[Member], None]


class Fetching:
    """One request's fetches (see :class:`kvdb.restore.Fetch`). ``accept`` judges a member;
    ``filling`` takes what came, None where nothing is stored.

    ``given`` are bytes by remote; ``unchecked`` is a block of a build that must be compared first:
    what was wanted with it is lost until then.
    """

    def __init__(
        self,
        found: Found,
        accept: Callable[[Member], Verdict],
        filling: Filling | None,
        clock: Environment,
        idle_seconds: float,
        compute_seconds: float | None,
    ) -> None:
        self.found = found
        self.accept = accept
        self.filling = filling
        self.clock = clock
        self.idle_seconds = idle_seconds
        self.compute_seconds = compute_seconds
        self.buffers = Staging()
        self.given: Counter[str] = Counter()
        self.unchecked: Member | None = None
        self._along: Collection[ObjectName] = ()
        self._round: _Round | None = None
        self._cancelled = False
        self._mutex = threading.Lock()

    def along(self, names: Collection[ObjectName]) -> Fetching:
        """The next read takes these. Blocks that hold token ids instead of attention it does not
        read, and gets them all the same: what is stored stands on them."""
        self._along = names
        return self

    @property
    def nbytes(self) -> int:
        return sum(self.given.values())

    def cancel(self) -> None:
        """Nobody wants it any more: when this returns, no buffer is written to."""
        with self._mutex:
            self._cancelled = True
            running = self._round
        if running is not None:
            running.close()

    def __call__(self, items: Sequence[Item]) -> Sequence[Item]:
        required = set(self.found.record.layout.required)
        wanted: dict[ObjectName, list[Item]] = {}
        for item in items:
            part = None if item.part in required else item.part
            wanted.setdefault(ObjectName(item.block.index, part), []).append(item)
        layout = self.found.record.layout
        if self.filling is not None and all(layout.by_name[name].is_mark for name in required):
            for name in self._along:
                if name.part is None:
                    wanted.setdefault(name, [])

        def deliver(own: Sequence[Item]) -> Deliver:
            return lambda member: _scatter(member, own)

        lost = self.get({name: deliver(own) for name, own in wanted.items()})
        return [item for name in lost for item in wanted[name]]

    def get(self, wanted: Mapping[ObjectName, Deliver]) -> set[ObjectName]:
        """Get objects, and hand each to its taker in some thread; returns those that were lost."""
        names = sorted(wanted, key=lambda name: (name.block, name.part or ""))
        running = _Round(self, [_Object(n, wanted[n], self.found) for n in names])
        with self._mutex:
            if self._cancelled:
                return set(names)
            self._round = running
        return running.run()

    def part(self, name: ObjectName, part: str) -> Bytes | None:
        """One part's raw bytes."""
        came: list[Bytes] = []

        def take(member: Member) -> None:
            came.extend(member.raw(each).copy() for each in member.parts if each.part == part)

        self.get({name: take})
        return came[0] if came else None


def _scatter(member: Member, items: Sequence[Item]) -> None:
    raws = {part.part: member.raw(part) for part in member.parts}
    for item in items:
        item.target.scatter(raws[item.part], item.position, item.tokens, member.token_count)


class _Object:
    def __init__(self, name: ObjectName, deliver: Deliver, found: Found) -> None:
        self.name = name
        self.deliver = deliver
        self.key = found.key(name)
        self.room = found.room(name)
        self.sources = deque(found.best(name))


@dataclass(slots=True)
class _Lanes:
    """What one remote is to give, and how many threads are at it."""

    queue: deque[_Object]
    running: int = 0


class _Round:
    """Objects asked for together. Lanes are threads of the remotes; :meth:`run` waits for them."""

    def __init__(self, fetching: Fetching, objects: Sequence[_Object]) -> None:
        self._fetching = fetching
        self._objects = objects
        self._open = {each.name for each in objects}
        self._lost: set[ObjectName] = set()
        self._lanes: dict[Peer, _Lanes] = {}
        self._flying: dict[ObjectName, Peer] = {}
        self._moved: Counter[Peer] = Counter()
        self._busy = self._settled = 0
        self._closed = False
        self._condition = threading.Condition()
        total = sum(each.room for each in objects)
        self._batch = max(LEAST_BATCH_BYTES, min(BATCH_BYTES, total // (2 * FETCHING)))

    def run(self) -> set[ObjectName]:
        clock = self._fetching.clock
        began = clock.seconds()
        if self._fetching.filling is not None:
            self._fetching.filling.expect([each.name for each in self._objects])
        for each in self._objects:
            self._give(each)
        self._wait(began)
        self.close()
        for name in self._open:
            self._settle(name, None)
        if self._fetching.filling is not None:
            self._fetching.filling.finish()
        for peer, nbytes in self._moved.items():
            peer.rates.moved(nbytes, clock.seconds() - began)
        return self._lost | self._open

    def close(self) -> None:
        """Take nothing more; when this returns, nothing more is delivered or settled in a lane."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._busy)

    def _wait(self, began: float) -> None:
        """Until all is there or lost, or nothing has come for too long."""
        fetching, clock = self._fetching, self._fetching.clock
        estimate = fetching.found.load_ms([each.name for each in self._objects])
        largest = max((each.room for each in self._objects), default=0)
        with self._condition:
            budgets = [peer.budget_seconds for peer in self._lanes]
            idle = max([fetching.idle_seconds, *budgets]) + largest / SLOW_BYTES_PER_SECOND
            most = MOST_SECONDS if estimate is None else PATIENCE * estimate / 1e3
            most = max(2 * idle, min(most, fetching.compute_seconds or most))
            while self._open and not self._closed:
                seen, left = self._settled, began + most - clock.seconds()
                if not self._condition.wait_for(
                    lambda seen=seen: self._closed or self._settled != seen,  # type: ignore[misc]
                    max(0.0, min(idle, left)),
                ):
                    break
            slow: set[Peer] = set()
            if not self._closed:
                slow = {self._flying[name] for name in self._open & self._flying.keys()}
                slow |= {peer for peer, lanes in self._lanes.items() if lanes.queue}
            moves = clock.seconds() - began >= most
        for peer in slow:
            if moves:
                peer.counters.add("late")  # how slow it is, its rate says from now on
            else:
                peer.went_wrong("get", RemoteUnreachable("It stopped in the middle of a restore."))

    # -- in the lanes ------------------------------------------------------------------------

    def _give(self, each: _Object) -> None:
        """Queue an object at the fastest remote that has it and was not tried for it yet."""
        while each.sources:
            peer = each.sources.popleft()
            if peer.down_seconds("ask", "get"):
                continue
            with self._condition:
                if self._closed:
                    return
                lanes = self._lanes.setdefault(peer, _Lanes(deque()))
                lanes.queue.append(each)
                more = lanes.running < FETCHING
                lanes.running += more
            if more:
                peer.fetching.submit(partial(self._lane, peer, lanes))
            return
        with self._condition:
            if self._closed:
                return  # it is among the open ones, which run() gives up
            self._busy += 1
        try:
            self._settle(each.name, None)
        finally:
            with self._condition:
                self._busy -= 1
                self._lost.add(each.name)
                self._done(each)

    def _done(self, each: _Object) -> None:
        self._open.discard(each.name)
        self._settled += 1
        self._condition.notify_all()

    def _take(self, peer: Peer, lanes: _Lanes) -> dict[int, _Object]:
        """The next objects to ask for, by number; nothing when there are no more."""
        batch: list[_Object] = []
        nbytes = 0
        with self._condition:
            while lanes.queue and not self._closed:
                if batch and nbytes + lanes.queue[0].room > self._batch:
                    break
                batch.append(lanes.queue.popleft())
                nbytes += batch[-1].room
                self._flying[batch[-1].name] = peer
            lanes.running -= not batch
        return dict(enumerate(batch))

    def _lane(self, peer: Peer, lanes: _Lanes) -> None:
        while batch := self._take(peer, lanes):
            try:
                self._fetch(peer, batch)
            except Exception:  # whatever a remote's client raises is counted, and costs its objects
                with self._condition:
                    batch |= enumerate(lanes.queue, 1 + max(batch, default=0))
                    lanes.queue.clear()
            for each in batch.values():
                self._give(each)

    def _fetch(self, peer: Peer, batch: dict[int, _Object]) -> None:
        """Ask for a batch; what is left in it did not come."""
        buffers = {i: self._fetching.buffers.lend(each.room) for i, each in batch.items()}
        gets = [Get(each.key, buffers[i].data) for i, each in batch.items()]
        with peer.watched("get") as remote:
            for got in remote.get_many(gets):
                each = batch[got.index]
                if got.nbytes is None:
                    _missed(peer, each, got)
                elif self._arrived(peer, each, buffers[got.index][: got.nbytes]):
                    del batch[got.index]
                if self._closed:
                    return
        # What is to be stored is the writer's now; after a failure somebody may still write there.
        kept = () if self._fetching.filling is None else buffers.keys() - batch.keys()
        self._fetching.buffers.take_back([buffers[i] for i in buffers if i not in kept])

    def _arrived(self, peer: Peer, each: _Object, data: Bytes) -> bool:
        """Check an object and deliver it; False where it is not what it should be."""
        fetching = self._fetching
        try:
            member = unpack(each.key, data, fetching.found.record)
        except IntegrityError as error:
            peer.reject(each.key, str(error))
            return False
        verdict = fetching.accept(member)
        if verdict == "refuse":
            peer.learn(each.key, present=False)
            return False
        with self._condition:
            if verdict in ("check", "stop") and not self._closed:
                fetching.unchecked = member if verdict == "check" else None
                self._closed = True
                self._condition.notify_all()
            if self._closed:
                return True
            self._busy += 1
        there = False
        try:
            each.deliver(member)
            self._settle(each.name, member)
            there = True
        finally:
            with self._condition:
                self._busy -= 1
                self._condition.notify_all()
                if there:
                    self._moved[peer] += data.nbytes
                    fetching.given[peer.name] += data.nbytes
                    self._done(each)
        peer.counters.add("got")
        peer.counters.add("got_bytes", data.nbytes)
        return True

    def _settle(self, name: ObjectName, member: Member | None) -> None:
        if self._fetching.filling is not None:
            self._fetching.filling.settle(name, member)


def _missed(peer: Peer, each: _Object, got: Got) -> None:
    if got.problem == "too large":
        peer.reject(each.key, "An object is larger than its layout allows.")
        return
    peer.learn(each.key, present=False)
    if got.problem is not None:
        peer.counters.add("failed")
