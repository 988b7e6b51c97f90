"""What a request has of remotes: asked when the store lacks something, decided, fetched behind the
turns of others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from engine.buildcheck import comparable
from engine.logits import Row
from engine.plan import Jump, Plan
from engine.turns import Turn, Wait
from kvdb.remotes.economics import worth_loading
from kvdb.remotes.fetching import Fetching, Verdict
from kvdb.remotes.found import Answer, Found, ObjectName

if TYPE_CHECKING:
    from engine.storage import Bytes, Storage
    from kvdb.match import Match
    from kvdb.members import Member
    from kvdb.remotes.tier import Tier
    from kvdb.sequences import Sequence as Running
    from kvdb.writer import Ticket

T = TypeVar("T")
# Builds that one request compares with ours: a remote of many is of little use.
MAX_COMPARED = 2
Decision = Literal["loaded", "recomputed", "absent", "late", "down", "failed"]
UNANSWERED: dict[Answer, Decision] = {
    "found": "absent",  # only what is of no use
    "absent": "absent",
    "late": "late",
    "down": "down",
    "failed": "failed",
}


@dataclass(slots=True)
class RemoteUse:
    """What a request's row says of remotes."""

    name: str | None = None
    decision: Decision | None = None
    ms: float | None = None
    load_ms: float | None = None
    compute_ms: float | None = None
    nbytes: int = 0
    tokens: int = 0


class Remotes:
    """The remotes as one request meets them. ``exact``: only exact blocks of this build count;
    ``fill``: what comes is stored here."""

    def __init__(self, storage: Storage, tier: Tier, *, exact: bool, fill: bool) -> None:
        self._storage = storage
        self._tier = tier
        self._exact = exact
        self._fill = fill
        self._fetching: Fetching | None = None
        self._found: Found | None = None
        self._refused: set[str | None] = set()
        self._compared = 0
        self.use = RemoteUse()
        self.blocks: frozenset[int] = frozenset()  # what they fill or add, by index

    @property
    def tickets(self) -> Sequence[Ticket]:
        """Of the puts of what came."""
        filling = None if self._fetching is None else self._fetching.filling
        return () if filling is None else filling.tickets

    def extend(
        self, match: Match, make_plan: Callable[[Match], Plan]
    ) -> Generator[Turn, Row, Match]:
        """The match with what remotes have, where loading that is worth it; else as it is."""
        here = make_plan(match)
        if _forwarded(here) <= 1:
            return match
        speed = self._storage.speed.seconds_per_token
        worth = None if speed is None else speed * _forwarded(here) * 1e3
        question = self._tier.ask(match, worth)
        if question is None:
            return match
        if not question.done():
            yield Wait(question.done)
        found, use = question.result(), self.use
        use.name, use.ms = found.asked, found.ms
        use.decision = None if found.answer is None else UNANSWERED[found.answer]
        elsewhere = found.elsewhere()
        if not elsewhere:
            return match
        extended = match.extended(elsewhere)
        there = make_plan(extended)
        names = objects(extended, there)
        saved = _forwarded(here) - _forwarded(there)
        if saved <= 0 or not names:
            return match
        use.load_ms = found.load_ms(names)
        use.compute_ms = None if speed is None else speed * saved * 1e3
        if not worth_loading(use.load_ms, use.compute_ms, saved):
            use.decision = "recomputed"
            return match
        use.decision, self._found = "loaded", found
        self.blocks = frozenset(block.index for block in extended.blocks if block.id < 0)
        return extended

    def begin(self, running: Running | None) -> None:
        """What comes from now on is held by ``running``."""
        if self._found is not None:
            compute_ms = self.use.compute_ms
            self._fetching = self._tier.fetching(
                self._found,
                self._accept,
                fill=self._fill,
                running=running,
                compute_seconds=None if compute_ms is None else compute_ms / 1e3,
            )

    def logits(self, index: int) -> Generator[Turn, Row, Bytes | None]:
        """Stored logits of the prompt's last token."""
        fetching = self._require_fetching()
        name = ObjectName(index, "logits")
        raw = yield from self.fetched(lambda _: fetching.part(name, "logits"))
        fetching.unchecked = None
        return raw

    def bring(self, names: Iterable[ObjectName]) -> Generator[Turn, Row, set[ObjectName]]:
        """Have objects put into the store; those that did not come are returned."""
        fetching = self._require_fetching()
        wanted = dict.fromkeys(names, _nothing)
        lost = yield from self.fetched(lambda _: fetching.get(wanted))
        yield Wait(lambda: all(ticket.done for ticket in self.tickets))
        return lost

    def fetched(self, read: Callable[[Fetching], T]) -> Generator[Turn, Row, T]:
        """The result of ``read``, which runs in another thread meanwhile. Where the request ends
        first, nothing is written to its buffers any more."""
        fetching = self._require_fetching()
        result: Future[T] = self._tier.background(lambda: read(fetching))
        try:
            while not result.done():
                yield Wait(result.done)
        except BaseException:
            fetching.cancel()
            raise
        finally:
            self.use.nbytes = fetching.nbytes
            if fetching.given:
                self.use.name = fetching.given.most_common(1)[0][0]
        self._expect(self.tickets)
        return result.result()

    def release(self, index: int) -> None:
        """Block ``index`` is about to be put: what came and stands before it goes first."""
        filling = None if self._fetching is None else self._fetching.filling
        if filling is not None:
            known = len(filling.tickets)
            filling.release(index)
            self._expect(filling.tickets[known:])

    def _expect(self, tickets: Sequence[Ticket]) -> None:
        """Look-ups of this prompt wait for these puts."""
        match = self._require_fetching().found.match
        first = min(self.blocks, default=match.matched)
        self._storage.expect(match.tokens, first, [t for t in tickets if not t.done])

    def unchecked(self) -> Member | None:
        """A block of a build that must be compared before more is fetched."""
        if self._fetching is None:
            return None
        member, self._fetching.unchecked = self._fetching.unchecked, None
        self._compared += member is not None
        return member

    def refuse(self, build: str | None) -> None:
        """Use nothing of a build in this request."""
        self._refused.add(build)

    def failed(self) -> None:
        """What was to come did not, or not all of it."""
        self.use.decision = "failed"

    def _accept(self, member: Member) -> Verdict:
        builds = self._storage.builds
        if self._exact:
            return builds.exact(member)
        verdict = "refuse" if member.build in self._refused else builds.verdict(member.build)
        if verdict != "check":
            return verdict
        if comparable(member.record.layout, [part.part for part in member.parts]):
            return "check" if self._compared < MAX_COMPARED else "refuse"
        return "check" if member.parts[0].part == "logits" else "use"  # token ids

    def _require_fetching(self) -> Fetching:
        if self._fetching is None:
            raise RuntimeError("nothing was found in a remote")
        return self._fetching


def objects(match: Match, steps: Plan) -> list[ObjectName]:
    """What a plan takes from remotes."""
    names = [ObjectName(index, None) for index in steps.reads if match.blocks[index].id < 0]

    def add(index: int, part: str) -> None:
        reference = match.blocks[index].parts.get(part)
        if reference is not None and reference.is_remote:
            names.append(ObjectName(index, part))

    for step in steps.steps:
        if isinstance(step, Jump):
            for part, blocks in step.windows:
                for index in blocks:
                    add(index, part)
            for part in match.namespace.layout.states if step.state is not None else ():
                add(step.state or 0, part)
    if steps.stored_logits:
        add(len(match.blocks) - 1, "logits")
    return names


def _forwarded(steps: Plan) -> int:
    return steps.refilled + steps.computed


def _nothing(_: Member) -> None:
    pass
