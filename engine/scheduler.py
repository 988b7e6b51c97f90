"""Many requests on one MLX thread: who prefills next, who decodes together, who waits.

Every request is a coroutine (engine/generation.py). A turn is one prefill step of one of them, and
one decode step of all that decode. So a long prompt never keeps others from going on for longer
than a step, and gives way to a more urgent one after it, keeping its work.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
import numpy as np

from engine import mlxlm
from engine.batch import Decoder, Seat
from engine.events import End, Event, FinishReason, Load, Priority, Progress, Request
from engine.logits import Row
from engine.order import Order
from engine.turns import Cancelled, Forward, PromptEnd, StateLost, Turn, Wait
from kvdb.errors import Busy, OutOfMemory, QuotaExceeded
from kvdb.identity import Tokens

if TYPE_CHECKING:
    from engine.generation import Generation
    from engine.guard import Claim
    from engine.options import EngineOptions, TenantLimits
    from engine.prompt.encode import Prompt
    from engine.worker import Worker

# Requests whose ends say how soon there will be a place.
LATEST_ENDS = 16
# Decode steps after which the memory they take is measured again.
MEASURE_EVERY = 32
# What MLX raises when it lacks memory or meets what it cannot compute.
MODEL_FAILURES = (RuntimeError, ValueError, MemoryError)


class Client(Protocol):
    """Who asked: takes events, or one error instead of more of them."""

    @property
    def request(self) -> Request: ...
    @property
    def arrived(self) -> float: ...
    @property
    def cancelled(self) -> bool: ...
    @property
    def put(self) -> Callable[[Event | BaseException], None]: ...
    def accept(self, prompt: Prompt) -> None: ...


class Run:
    """One answer, from its arrival to its end."""

    def __init__(self, client: Client, generation: Generation) -> None:
        self.client = client
        self.generation = generation
        self.coroutine: Generator[Event | Turn, Row, None] | None = None
        self.forward: Forward | None = None
        self.wait: Wait | None = None
        self.claim: Claim | None = None  # memory for its state
        self.short = False  # it was refused a claim for now
        self.paused = False
        self.shared = False  # its prompt's other answers go their own ways
        self.priority: Priority = client.request.priority
        late = client.request.deadline_ms
        self.deadline = math.inf if late is None else client.arrived + late / 1e3

    @property
    def tenant(self) -> str:
        return self.client.request.tenant

    @property
    def arrived(self) -> float:
        return self.client.arrived

    @property
    def begun(self) -> bool:
        return self.coroutine is not None

    @property
    def first(self) -> bool:
        """It is the first of its request's answers."""
        return self.generation.index == 0

    @property
    def active(self) -> bool:
        """Begun and not paused: it takes a place."""
        return self.begun and not self.paused

    @property
    def ready(self) -> bool:
        """It could have a turn of its own, which one that decodes does not need."""
        if self.forward is not None:
            return self.paused
        return self.wait is None or self.wait.ready()

    def ended_by(self, now: float) -> FinishReason | None:
        """Why it must end before it is done, if so."""
        if self.client.cancelled:
            return "cancelled"
        return "deadline" if now >= self.deadline else None


class Scheduler:
    """All requests of one model. Every method runs on the MLX thread."""

    def __init__(
        self,
        worker: Worker,
        options: EngineOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self._options = options
        self._clock = clock
        self._order = Order(options.ageing_seconds, clock)
        self._decoder = Decoder(worker.model)
        self._runs: list[Run] = []  # in order of arrival
        # Those of them that have begun. Many may wait: a turn looks at each of those once, quickly.
        self._begun: list[Run] = []
        self._ends: deque[float] = deque(maxlen=LATEST_ENDS)  # when requests ended
        self._load = Load()
        self._age = 0  # turns since it was measured

    @property
    def idle(self) -> bool:
        return not self._runs

    def add(self, client: Client) -> None:
        """Take a request. What is wrong with it goes to the client, as an exception."""
        try:
            self._check_room()
            generation = self.worker.take(client.request)
            most = self._limits(client.request.tenant).tokens
            if most is not None and generation.tokens_at_most > most:
                raise QuotaExceeded(
                    f"The request may come to {generation.tokens_at_most} tokens, and its tenant "
                    f"may have {most} running: shorten it."
                )
        except BaseException as error:  # it belongs to the client, who is waiting for it
            client.put(error)
        else:
            client.accept(generation.given)
            self._runs.append(Run(client, generation))

    def _check_room(self) -> None:
        """Raise Busy where as many requests wait as may."""
        waiting = sum(not run.begun and run.first for run in self._runs)
        free = self._options.max_running - sum(run.active for run in self._begun)
        if waiting >= self._options.max_waiting + max(0, free):
            raise Busy(f"{waiting} requests are waiting: try again later.", self._seconds_to_end())

    def _seconds_to_end(self) -> float:
        """About how long it takes until the next request ends."""
        if not self._ends:
            return 1.0
        return min(max((self._clock() - self._ends[0]) / len(self._ends), 1.0), 60.0)

    def turn(self) -> bool:
        """One prefill step and one decode step; False where nothing could go on."""
        now = self._clock()
        for run in [run for run in self._runs if run.client.cancelled or now >= run.deadline]:
            if reason := run.ended_by(now):
                self._cancel(run, reason)
        chosen = None if self._settled() else self._next()
        if chosen is not None:
            self._order.took(chosen)
            self._advance(chosen)
        went_on = self._decode() or chosen is not None
        self._age += 1
        known = self._load.running + self._load.paused + self._load.waiting
        if chosen is not None or len(self._runs) != known or self._age >= MEASURE_EVERY:
            self._load, self._age = self._measure(), 0
        return went_on

    def close(self, error: BaseException) -> None:
        """Cancel what runs, and give what never began ``error``."""
        for run in list(self._runs):
            if run.begun:
                self._cancel(run, "cancelled")
            else:
                self._fail(run, error)
        self._load = self._measure()

    @property
    def load(self) -> Load:
        """What there was to do after the last turn, and the memory it took. While nothing comes or
        goes it is some decode steps old."""
        return self._load

    def _measure(self) -> Load:
        active = [run for run in self._runs if run.active]
        seats = [run.generation.seat for run in self._runs]
        own, shared = sum(seat.nbytes for seat in seats), self._decoder.nbytes
        return Load(
            running=len(active),
            prefilling=sum(run.forward is None for run in active),
            paused=sum(run.paused for run in self._runs),
            waiting=sum(not run.begun for run in self._runs),
            batches=len(self._decoder.groups),
            state_bytes=own + shared,
            padded_bytes=self._decoder.padded_nbytes,
        )

    # -- who goes next -----------------------------------------------------------------------

    def _settled(self) -> bool:
        """All places are taken by requests that decode, and of those that wait none could have
        one: :meth:`_next`, which looks at each of them, would find nothing."""
        active = [run for run in self._begun if run.active]
        if len(active) < self._options.max_running or any(run.forward is None for run in active):
            return False
        if self._yielding(active) is None:
            return True
        return not any(run.priority == "interactive" and not run.active for run in self._runs)

    def _next(self) -> Run | None:
        """Whose turn it is, with a place for it."""
        short = False  # of memory: what is next waits for it, and nothing new goes before
        full: set[Priority] = set()  # of these nothing new finds a place
        for run in self._order.sort([run for run in self._runs if run.ready]):
            if run.priority in full and not run.begun:
                continue
            # A prompt that another one is computing is waited for, with this one's urgency.
            chosen = run if run.begun else self._leader(run) or run
            if chosen.active:
                if chosen.ready:
                    return chosen
                continue
            place = self._place(run)
            if place is None:
                full.add(run.priority)
                continue
            if not self._allowed(chosen) or (short and chosen.claim is None):
                continue
            if not self._claim(chosen):
                short = True
                continue
            for other in place:
                self._pause(other)
            chosen.paused = False
            if chosen.forward is None:
                return chosen
        return None

    def _pause(self, run: Run) -> None:
        run.paused = True
        try:
            run.generation.seat.leave()
        except MODEL_FAILURES as error:
            self._lost(run, error)

    def _claim(self, run: Run) -> bool:
        """Memory for its state at its longest; False while others hold it."""
        if run.claim is None:
            nbytes = self.worker.state_bytes(run.generation.tokens_at_most)
            prefilling = [other for other in self._begun if other.active and not other.forward]
            longest = max(len(other.generation.prompt) for other in (run, *prefilling))
            spare = self.worker.steps.least(longest)
            try:
                run.claim = self.worker.guard.claim(nbytes, spare=spare, again=run.short)
                run.short = run.claim is None
            except OutOfMemory as error:
                self._fail(run, error)
        return run.claim is not None

    def _leader(self, run: Run) -> Run | None:
        """A running prefill that is about to compute what ``run`` would compute, too."""
        mine = run.generation
        if mine.key_space is None or mine.shareable:
            return None
        size = self.worker.block_tokens
        for other in self._begun:
            theirs = other.generation
            if other.forward or theirs.key_space != mine.key_space:
                continue
            if theirs.done == len(theirs.prompt):
                continue
            common = _common(mine.prompt, theirs.prompt)
            same = common == len(mine.prompt) == len(theirs.prompt)
            if same or (theirs.stores and common // size * size > theirs.done):
                return other
        return None

    def _allowed(self, run: Run) -> bool:
        """Whether its tenant may have one more running."""
        if run.begun:
            return True
        limits = self._limits(run.tenant)
        theirs = [other for other in self._begun if other.tenant == run.tenant]
        tokens = sum(other.generation.tokens_at_most for other in theirs)
        return not (
            (limits.requests is not None and len(theirs) >= limits.requests)
            or (
                limits.tokens is not None
                and theirs
                and tokens + run.generation.tokens_at_most > limits.tokens
            )
        )

    def _limits(self, tenant: str) -> TenantLimits:
        return self._options.tenants.get(tenant, self._options.tenant_limits)

    def _place(self, run: Run) -> list[Run] | None:
        """Who must pause so that there is a place for one more; None where there is none. An
        interactive request may have the latest batch one's."""
        active = [other for other in self._begun if other.active]
        if len(active) < self._options.max_running:
            return []
        latest = None if run.priority == "batch" else self._yielding(active)
        return None if latest is None else [latest]

    def _yielding(self, active: Sequence[Run]) -> Run | None:
        """The batch request that would pause for an interactive one."""
        batch = [run for run in active if run.priority == "batch"]
        paused = sum(run.paused for run in self._begun)
        return batch[-1] if batch and paused < self._options.max_running else None

    # -- a step of one -----------------------------------------------------------------------

    def _advance(self, run: Run) -> None:
        """A request's next step, up to where others may have their turn."""
        if run.coroutine is None:
            run.coroutine = run.generation.events()
            self._begun.append(run)
            self._begun.sort(key=lambda run: run.arrived)
        run.wait = None
        self._resume(run, lambda coroutine: next(coroutine))

    def _resume(
        self, run: Run, how: Callable[[Generator[Event | Turn, Row, None]], Event | Turn]
    ) -> None:
        """Let a coroutine go on until it gives up its turn, decodes, or ends."""
        run.forward = None
        if run.coroutine is None:
            return
        try:
            item = how(run.coroutine)
            while self._handle(run, item):
                item = next(run.coroutine)
        except BaseException as error:  # it belongs to the client, who is waiting for it
            self._fail(run, error)

    def _handle(self, run: Run, item: Event | Turn) -> bool:
        """Do what a coroutine asks for; True where it may go on in this turn."""
        if isinstance(item, Forward):
            run.forward = item
            return False
        if isinstance(item, Wait):
            run.wait = item
            return False
        if isinstance(item, PromptEnd):
            self._share(run, item.logits)
            return True
        run.client.put(item)
        if isinstance(item, End):
            self._end_others(run, item.reason)
            self._remove(run)
            return False
        return not isinstance(item, Progress)

    def _share(self, run: Run, logits: mx.array) -> None:
        """Let other answers to the same prompt go on from where it ends."""
        mine = run.generation
        run.shared = True
        for answer in mine.others():
            mine.share(answer, logits)
            self._runs.append(Run(run.client, answer))
        if mine.key_space is None or not mine.shareable:
            return
        free = self._options.max_running - sum(other.active for other in self._begun)
        for other in self._runs:
            theirs = other.generation
            if free <= 0:
                return
            if (
                not other.begun
                and theirs.key_space == mine.key_space
                and np.array_equal(theirs.prompt, mine.prompt)
                and not theirs.shareable
            ):
                mine.share(theirs, logits)
                free -= 1

    # -- a step of all -----------------------------------------------------------------------

    def _decode(self) -> bool:
        """One token for every request that decodes."""
        runs = [run for run in self._begun if run.forward is not None and not run.paused]
        if not runs:
            return False
        forwards = {run: run.forward for run in runs if run.forward is not None}
        together = [run for run in runs if not forwards[run].alone]
        rows: dict[Seat, Row] = {}
        try:
            self._decoder.arrange([forwards[run].seat for run in together], self._fits)
            tokens = {forwards[run].seat: forwards[run].token for run in together}
            for group in self._decoder.groups:
                rows |= self._decoder.forward(group, [tokens[seat] for seat in group])
        except MODEL_FAILURES as error:
            for run in together:
                self._lost(run, error)
            together = []
        for run in together:
            self._give(run, rows[forwards[run].seat])
        for run in runs:
            if forwards[run].alone:
                self._decode_alone(run, forwards[run])
        # What the next turn puts through the model is chosen while Python does other things. A
        # failure comes again there.
        with contextlib.suppress(*MODEL_FAILURES):
            mlxlm.start(*(run.forward.token for run in self._begun if run.forward is not None))
        return True

    def _fits(self, padding: int) -> bool:
        """Whether there is memory for ``padding`` more tokens, which hold nothing."""
        nbytes = self.worker.state_bytes(padding)
        return self.worker.guard.room(nbytes) >= nbytes

    def _decode_alone(self, run: Run, forward: Forward) -> None:
        try:
            rows = self._decoder.forward([forward.seat], [forward.token])
        except MODEL_FAILURES as error:
            self._fail(run, error)
        else:
            self._give(run, rows[forward.seat])

    def _give(self, run: Run, row: Row) -> None:
        self._resume(run, lambda coroutine: coroutine.send(row))

    def _lost(self, run: Run, error: Exception) -> None:
        """A step of several failed: each goes on alone, so that only who is at fault fails."""
        run.generation.seat.lose()
        self._resume(run, lambda coroutine: coroutine.throw(StateLost(error)))

    # -- ends --------------------------------------------------------------------------------

    def _cancel(self, run: Run, reason: FinishReason) -> None:
        if run.begun:
            self._resume(run, lambda coroutine: coroutine.throw(Cancelled(reason)))
        else:
            run.client.put(run.generation.never(reason))
            self._end_others(run, reason)
            self._remove(run)

    def _end_others(self, run: Run, reason: FinishReason) -> None:
        """End the other answers to a prompt that never got to its end."""
        if not run.shared:
            for other in run.generation.others():
                run.client.put(other.never(reason))

    def _fail(self, run: Run, error: BaseException) -> None:
        """The client gets the error; other answers to its request end, too."""
        for other in list(self._runs):
            if other.client is run.client:
                self._remove(other)
                if other.coroutine is not None:
                    other.coroutine.close()
        run.client.put(error)

    def _remove(self, run: Run) -> None:
        if run in self._runs:
            self._runs.remove(run)
            if run.begun:
                self._begun.remove(run)
            self._ends.append(self._clock())
        run.generation.release()  # also if it shared a prompt, and never began
        if run.claim is not None:
            run.claim.release()
        if not any(other.forward for other in self._begun):
            self._decoder.arrange([])  # nobody is left: give the memory back


def _common(a: Tokens, b: Tokens) -> int:
    """How many first tokens two prompts share."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
