"""What remotes have of one prompt: asked once, in the background, each within its budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvdb.clock import Environment
from kvdb.match import Match
from kvdb.remotes.naming import BlockKey, optional_parts
from kvdb.remotes.packing import most_bytes
from kvdb.remotes.peer import Peer
from kvdb.shards import NamespaceRecord

# What came of asking. Of several remotes' the first in this order counts.
Answer = Literal["found", "late", "failed", "absent", "down"]
ANSWERS: tuple[Answer, ...] = ("found", "late", "failed", "absent", "down")


class ObjectName(NamedTuple):
    """An object of the prompt: ``part`` is None for the required parts of ``block``."""

    block: int
    part: str | None


@dataclass(frozen=True, slots=True)
class Wish:
    """A block of the prompt that remotes are asked for, and the optional parts worth having."""

    index: int
    body: bool
    parts: tuple[str, ...]

    @property
    def names(self) -> list[ObjectName]:
        body = [ObjectName(self.index, None)] if self.body else []
        return [*body, *(ObjectName(self.index, part) for part in self.parts)]


@dataclass(slots=True)
class Found:
    """``sources`` are the remotes that have an object. ``ms`` is how long was waited."""

    record: NamespaceRecord
    match: Match
    sources: dict[ObjectName, list[Peer]] = field(default_factory=dict)
    answer: Answer | None = None
    asked: str | None = None
    ms: float = 0.0

    def elsewhere(self) -> dict[int, list[str]]:
        """Parts by block, for :meth:`kvdb.match.Match.extended`; nothing beyond a gap that only
        parts without their block follow."""
        required = self.record.layout.required
        parts: dict[int, list[str]] = {}
        for name in self.sources:
            parts.setdefault(name.block, []).extend(required if name.part is None else [name.part])
        here = self.match.matched
        return {
            index: names
            for index, names in parts.items()
            if index < here or set(required).issubset(names)
        }

    def key(self, name: ObjectName) -> str:
        return key_in(self.record, self.match, name)

    def room(self, name: ObjectName) -> int:
        """The most bytes that an object may have."""
        size = self.record.block_tokens
        tokens = min(size, len(self.match.tokens) - name.block * size)
        return most_bytes(self.record.layout, name.part, tokens)

    def best(self, name: ObjectName) -> list[Peer]:
        """Who has an object, the fastest first; one that was never measured goes first."""
        room = self.room(name)
        return sorted(self.sources.get(name, ()), key=lambda peer: peer.rates.load_ms(room) or 0.0)

    def load_ms(self, names: Iterable[ObjectName]) -> float | None:
        """About how long it takes to load some objects; None where that is not known."""
        nbytes: dict[str, int] = {}
        peers: dict[str, Peer] = {}
        for name in names:
            best = self.best(name)
            if best:
                peers[best[0].name] = best[0]
                nbytes[best[0].name] = nbytes.get(best[0].name, 0) + self.room(name)
        times = [peers[name].rates.load_ms(count) for name, count in nbytes.items()]
        known = [time for time in times if time is not None]
        return max(known) if known and len(known) == len(times) else None


def key_in(record: NamespaceRecord, match: Match, name: ObjectName) -> str:
    return str(BlockKey(record.fingerprint, name.block, match.hashes[name.block], name.part))


def wishes(match: Match) -> list[Wish]:
    """What is not here: blocks beyond the matched ones, holes, and what the last live ones lack
    of states and windows. Logits are those of the prompt's last token."""
    layout = match.namespace.layout
    optional = [name for name in optional_parts(layout) if name != "logits"]
    last = len(match.hashes) - 1
    logits = ("logits",) if layout.logits is not None else ()
    found: list[Wish] = []
    for block in reversed(match.blocks):
        parts = tuple(name for name in optional if name not in block.parts)
        if block.live and not parts:
            break  # a restore may end here
        if block.live:
            found.append(Wish(block.index, False, parts))
    holes = [Wish(index, True, tuple(optional)) for index in match.holes]
    beyond = [Wish(index, True, tuple(optional)) for index in range(match.matched, last + 1)]
    every = sorted([*found, *holes, *beyond], key=lambda wish: wish.index)
    if every and every[-1].index == last:
        every[-1] = Wish(last, every[-1].body, (*every[-1].parts, *logits))
    return [wish for wish in every if wish.names]


def probes(count: int) -> list[int]:
    """Positions to be asked for first: mostly nothing is there, or all up to some place."""
    steps = [0]
    while steps[-1] * 2 + 1 < count:
        steps.append(steps[-1] * 2 + 1)
    return sorted({*steps, count - 1})


class Question:
    """Remotes being asked for one prompt. ``done`` in time: what is late by then is left out, but
    remembered for the next prompt when it comes."""

    def __init__(
        self, peers: Sequence[Peer], record: NamespaceRecord, match: Match, clock: Environment
    ) -> None:
        self._clock = clock
        self._began = clock.seconds()
        self._wishes = wishes(match)
        self._found = Found(record, match)
        self._answers: list[Answer] = []
        self._asked: list[tuple[Peer, Future[dict[ObjectName, bool]]]] = []
        self._settled = False
        for peer in peers if self._wishes else ():
            self._ask(peer)

    def _ask(self, peer: Peer) -> None:
        asking = _Asking(peer, self._found, self._wishes)
        if peer.down_seconds("ask", "get"):
            self._answers.append("down")
        elif (known := asking.known()) is not None:
            self._take(peer, known)
        elif not peer.breakers["ask"].allows(peer.budget_seconds):
            self._answers.append("down")
        else:
            self._asked.append((peer, peer.asking.submit(asking.ask)))
        self._found.asked = self._found.asked or peer.name

    def done(self) -> bool:
        """Whether there is nothing more to wait for."""
        now = self._clock.seconds()
        return all(
            future.done() or now - self._began >= peer.budget_seconds
            for peer, future in self._asked
        )

    def result(self) -> Found:
        """What was found; call it when it is done."""
        if not self._settled:
            self._settled = True
            for peer, future in self._asked:
                if not future.done():
                    future.cancel()  # one that has begun goes on
                    peer.was_late()
                    self._answers.append("late")
                elif future.cancelled() or future.exception() is not None:
                    self._answers.append("failed")
                else:
                    self._take(peer, future.result())
            found = self._found
            found.answer = next((each for each in ANSWERS if each in self._answers), None)
            found.ms = (self._clock.seconds() - self._began) * 1e3
        return self._found

    def _take(self, peer: Peer, there: dict[ObjectName, bool]) -> None:
        names = [name for name, present in there.items() if present]
        self._answers.append("found" if names else "absent")
        for name in names:
            self._found.sources.setdefault(name, []).append(peer)


class _Asking:
    """One remote asked for some blocks: first for a few, then for all up to where they end."""

    def __init__(self, peer: Peer, found: Found, wished: Sequence[Wish]) -> None:
        self._peer = peer
        self._found = found
        self._wishes = wished
        self._probes = probes(len(wished))
        self._first = [self._wishes[at].names[0] for at in self._probes]

    def known(self) -> dict[ObjectName, bool] | None:
        """The answer, where all of it is known already."""
        first = self._peer.recall(self._keys(self._first))
        if first is None:
            return None
        names = self._rest(first)
        rest = self._peer.recall(self._keys(names))
        return None if rest is None else dict(zip(names, rest, strict=True))

    def ask(self) -> dict[ObjectName, bool]:
        names = self._rest(self._peer.exists(self._keys(self._first)))
        return dict(zip(names, self._peer.exists(self._keys(names)), strict=True))

    def _rest(self, first: Sequence[bool]) -> list[ObjectName]:
        """What to ask for, by what the probes found."""
        deepest = max((number for number, there in enumerate(first) if there), default=-1)
        if deepest < 0:
            return []
        end = self._probes[deepest + 1] if deepest + 1 < len(self._probes) else len(self._wishes)
        return [name for wish in self._wishes[:end] for name in wish.names]

    def _keys(self, names: Sequence[ObjectName]) -> list[str]:
        return [key_in(self._found.record, self._found.match, name) for name in names]
