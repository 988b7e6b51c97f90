"""One request on the MLX thread: look up, plan, restore, compute, decode, store, record.

It is a coroutine: whatever may take long it does a step at a time, and what others can share, or
must not wait for, it asks of the scheduler (engine/turns.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from engine import mlxlm
from engine.accounts import Accounts, since
from engine.batch import Seat
from engine.boundaries import NO_BOUNDARIES, boundaries
from engine.events import End, Event, FinishReason, Progress, Request, Stats, Token
from engine.holding import hold
from engine.live import LiveState
from engine.logits import Row
from engine.lookup import Lookup
from engine.masking import masked
from engine.measuring import KL_TOKENS, exact_request, measure
from engine.plan import Compute, Jump, Plan, Refill
from engine.prefill import Prefill
from engine.prompt.encode import Prompt
from engine.recorder import Recorder
from engine.restore import Buffers, capacity_for, logits_bytes
from engine.sampling import Choice, Chooser, top_logprobs
from engine.text import Output
from engine.turns import Cancelled, Forward, PromptEnd, StateLost, Turn, Wait
from kvdb.identity import Tokens, as_tokens, chain_hashes

if TYPE_CHECKING:
    from engine.storage import Storage
    from engine.worker import Worker

# mlx-lm gives freed buffers back this often while decoding.
CLEAR_EVERY = 256
CUT_SHORT = ("cancelled", "deadline")


class Generation:
    """The state of one answer to one request, from its tokens to its record."""

    def __init__(
        self,
        worker: Worker,
        request: Request,
        *,
        load_ms: float = 0.0,
        warmup_ms: float = 0.0,
        index: int = 0,
        given: Prompt | None = None,
    ) -> None:
        self._took = Accounts(load_ms, warmup_ms)
        self._worker = worker
        self._request = request
        self.index = index
        loaded = worker.loaded
        if given is None:
            given = worker.encode(request)
        self.given, self._prompt = given, given.tokens
        self._room = self._generation_room(loaded.context)
        own = [make() for make in request.processors]
        self._chooser = Chooser(request.sampling, self._prompt, worker.vocabulary, index, own)
        guide = request.guide
        self._guide = None if guide is None else worker.token_masks.compile(guide)
        self._output = Output(request, loaded.tokenizer, loaded.eos, self._room)
        self._storage: Storage | None = None
        if request.read or request.store:
            self._storage = worker.storage_for(request.salt, request.tenant)
        self._lookup = Lookup(worker, self._storage, request, given, self._took)
        self._recorder: Recorder | None = None
        self._live: LiveState | None = None
        self._shared: mx.array | None = None  # logits of a prompt that another request computed
        self._exact = request.reuse == "exact"
        self._alone = "exact mode" if self._exact else worker.alone
        self._buffers: Buffers | None = None
        self._boundaries = NO_BOUNDARIES
        self._generated: list[int] = []
        self._said: list[str] = []  # the text of the answer
        self._last_start = 0  # where the forward began that gave the prompt's logits
        self._at = 0  # where prefilling has come to
        self._fed = 0  # generated tokens whose state is, or is about to be, in the caches
        self._kept = len(self._prompt)  # tokens whose blocks were handed to the store
        self._finish: FinishReason | None = None
        self._lost = False  # the state went with a failed forward
        self.raw: list[mx.array] | None = [] if request.measure_kl else None
        self.model = mlxlm.CountingModel(worker.model.model, worker.model)
        self._took.ready()

    @property
    def prompt(self) -> Tokens:
        return self._prompt

    @property
    def done(self) -> int:
        """How many prompt tokens have their state."""
        return self._took.done

    @property
    def tokens_at_most(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self._prompt) + self._room

    @property
    def key_space(self) -> tuple[object, ...] | None:
        """Requests of an equal one may use each other's state; None uses nobody's."""
        request = self._request
        if not request.read or not request.store:
            return None
        return request.salt, request.reuse, request.approximate

    @property
    def seat(self) -> Seat:
        """Where its state is; before it begins, there is none."""
        return Seat([], 0) if self._live is None else self._live.seat

    @property
    def stores(self) -> bool:
        """Whether what it computes is stored, so that others may wait for a part of it."""
        return self._storage is not None and self._request.store and not self._took.masked

    def others(self) -> list[Generation]:
        """The further answers that the request asks for; each waits for :meth:`share`."""
        count = self._request.n if self.index == 0 else 1
        return [
            Generation(self._worker, self._request, index=index, given=self.given)
            for index in range(1, count)
        ]

    @property
    def shareable(self) -> bool:
        """Whether the state of the whole prompt is here, and nothing behind it."""
        return self.seat.length == len(self._prompt)

    def share(self, other: Generation, logits: mx.array) -> None:
        """Let another answer to the same prompt go on from here. Memory is shared until one of
        the two appends, stored blocks for ever."""
        other._shared = logits
        other._took.share(len(self._prompt), self._took)
        other._alone = self._alone
        if self._live is not None:
            other._live = self._live.forked()
        self._lookup.fork(other._lookup)
        if self._recorder is not None and other._live is not None:
            other._recorder = self._recorder.forked(other._live, other._lookup.running)

    def events(self) -> Generator[Event | Turn, Row, None]:
        """Run to the end. The lease is released whatever happens."""
        try:
            try:
                if self._guide is not None:
                    yield Wait(self._guide.done)
                    self._chooser.add(self._worker.token_masks.mask(self._guide.result()))
                self._took.begin()
                yield from self._answer()
            except Cancelled as cancelled:
                self._finish = cancelled.reason
                self._keep_cut_short()
            self._keep_generated(final=True)
            self._lookup.fill()
            if self._live is not None:  # it may be a row of a batch that goes on without it
                self._live.seat.lose()
            yield from self._hold()
            yield from self._measure()
        finally:
            self.release()
        stats, rest = self._stats(), self._output.rest()
        self._said.append(rest)
        self._record(stats)
        stop = self._output.stop_text
        yield End(self._finish or "length", rest, stats, self.index, stop)

    def release(self) -> None:
        """Let go of what is held in the store. Idempotent."""
        self._lookup.release()

    def never(self, reason: FinishReason) -> End:
        """The end of a request that never began."""
        self._took.begin()
        return End(reason, "", self._stats(), self.index)

    def _answer(self) -> Generator[Event | Turn, Row, None]:
        if self._shared is None:
            choice = yield from self.begin()
        else:
            self._took.have_logits()
            choice = self._choose(Row.alone(self._shared))
            yield self._emit(choice)
            yield PromptEnd(self._shared)
        if self._finish is None and self._live is not None:
            yield from self._decode(choice, self._live)

    def begin(self) -> Generator[Event | Turn, Row, Choice]:
        """The state of the whole prompt, and the first token."""
        steps, logits = yield from self._look_up()
        choice = None
        if logits is not None:
            # Sampled before any payload is read: the state is restored behind it.
            self._took.have_logits(stored=True)
            choice = self._choose(Row.alone(logits))
            yield self._emit(choice)
        if choice is not None and logits is not None and self._ends_here():
            self._took.settle(steps, ends=True)
            yield PromptEnd(logits)
            return choice
        steps, live = yield from self._restore(steps)
        yield Progress(self.done, len(self._prompt))
        computed = yield from self._compute(steps, live)
        raw = None if computed is None else logits_bytes(computed)
        logits = logits if computed is None else computed
        if logits is None:
            raise RuntimeError("a plan gave no logits")
        if choice is None:
            choice = self._choose(Row.alone(logits))
            yield self._emit(choice)
        if self._recorder is not None and raw is not None:
            # What the last forward computed, and the logits after it.
            end = len(self._prompt)
            self._recorder.feed(self._prompt, self._last_start, end, tail=True, logits=raw)
        live.seat.length = len(self._prompt)
        yield PromptEnd(logits)
        return choice

    def _ends_here(self) -> bool:
        """Whether neither this answer nor another one to its prompt goes on after this token."""
        return self._finish is not None and (self._request.n == 1 or self._room == 1)

    # -- what is stored ----------------------------------------------------------------------

    def _look_up(self) -> Generator[Turn, Row, tuple[Plan, mx.array | None]]:
        """What to do, and the stored logits that the answer begins from, if it does."""
        began = time.perf_counter()
        yield from self._lookup.find()
        steps, logits = self._lookup.plan(), None
        if steps.stored_logits:
            logits = yield from self._lookup.stored_logits()
            if logits is None:
                steps = self._lookup.plan(logits_ok=False)
        self._took.lookup_ms = since(began)
        return steps, logits

    def _restore(self, steps: Plan) -> Generator[Turn, Row, tuple[Plan, LiveState]]:
        """Read what the plan restores; what cannot be read makes another plan, the request goes
        on."""
        began = time.perf_counter()
        worker, layout, exact = self._worker, self._worker.layout, self._request.reuse == "exact"
        if layout is None:
            self._live = LiveState(None, worker.new_caches())
            self._took.settle(steps)
            return steps, self._live
        capacity = capacity_for(len(self._prompt), self._room)
        self._buffers = buffers = worker.buffers(layout, capacity)
        # Stored logits that could not be read before cannot be now.
        steps = yield from self._lookup.read(steps, buffers, logits_ok=bool(self._generated))
        caches = worker.new_caches()
        self._live = buffers.live(masked(caches, steps.masks) if steps.masks else caches)
        self._took.settle(steps)
        if steps.masks:
            self._live.clear(steps.masks)
            self._alone = "an approximate skip"
        prompt = len(self._prompt)
        messages = self._message_ends() if layout.states and steps.start < prompt else ()
        self._boundaries = boundaries(layout, worker.block_tokens, prompt, messages, exact=exact)
        self._took.set_up(since(began))
        # What is computed over masked blocks is no function of the prefix: it is never stored.
        if self._storage is not None and self._request.store and not steps.masks:
            match = self._lookup.match
            known = set() if match is None else {match.blocks[i].end for i in steps.reads}
            self._recorder = Recorder(
                self._storage,
                self._live,
                self._boundaries,
                known,
                exact=exact,
                running=self._lookup.running,
                before=self._lookup.fill,
            )
        return steps, self._live

    def _message_ends(self) -> tuple[int, ...]:
        """Where another request may go on differently: as it was told, and behind the last message
        before the answer."""
        parts = self.given.segments() if self._request.messages else []
        ends = [part.end for part in parts if part.kind in ("system", "message")]
        marks = self.given.mark_ends(self._request.marks)
        return (*self._request.boundaries, *marks, *ends[-1:])

    # -- computing the prompt ----------------------------------------------------------------

    def _compute(self, steps: Plan, live: LiveState) -> Generator[Event, None, mx.array | None]:
        """Refill and compute; returns the raw logits of the last token if it was computed."""
        began = time.perf_counter()
        worker, exact = self._worker, self._exact
        prefill = Prefill(
            self.model,
            live,
            self._prompt,
            worker.block_tokens if exact else worker.step,
            exact,
            self._boundaries,
            worker.steps,
        )
        logits = None
        try:
            for part in steps.steps:
                if isinstance(part, Jump):
                    self._jump(part, live)
                elif isinstance(part, Refill):
                    live.seek(part.start)
                    yield from self._run(prefill, part.start, part.end, refill=True)
                elif isinstance(part, Compute):
                    live.seek(part.start)
                    self._last_start = prefill.last_start(part.start, part.end)
                    yield from self._run(prefill, part.start, self._last_start, refill=False)
                    logits = prefill.last(self._last_start, part.end)
                    self._took.computed += part.end - self._last_start
        finally:
            self._took.prefill_ms += since(began)
            self._took.have_logits()
        live.seek(len(self._prompt))
        return logits

    def _jump(self, jump: Jump, live: LiveState) -> None:
        if self._buffers is None:
            return
        pieces = self._buffers.jump(jump, live, self._worker.block_tokens)
        self._at = 0  # the caches no longer stand where prefilling left them
        if self._recorder is not None:
            self._recorder.resume(jump.end, pieces)

    def _run(self, prefill: Prefill, start: int, end: int, *, refill: bool) -> Iterator[Event]:
        at = start
        for done in prefill.run(start, end):
            if refill:
                self._took.refilled += done - at
            else:
                self._took.computed += done - at
            if self._recorder is not None:
                self._recorder.feed(self._prompt, at, done)
            at = self._at = done
            yield Progress(self.done, len(self._prompt))

    def _keep_cut_short(self) -> None:
        """A prompt that was cancelled leaves its state where it got to, if that is where the
        caches stand."""
        if self._recorder is not None and self._at and not self._generated:
            self._recorder.keep_state(self._prompt, self._at)

    # -- generating --------------------------------------------------------------------------

    def _choose(self, row: Row, before: mx.array | None = None) -> Choice:
        if self._worker.observe is not None:
            self._worker.observe(row.raw)
        if self.raw is not None and len(self.raw) < KL_TOKENS:
            self.raw.append(row.raw)
        return self._chooser.choose(row, before)

    def _emit(self, choice: Choice) -> Token:
        token = int(mlxlm.scalar(choice.token))
        self._took.token()
        self._generated.append(token)
        text, self._finish = self._output.feed(token)
        self._said.append(text)
        if self._request.logprobs is None:
            return Token(token, text, index=self.index)
        logprob, best = top_logprobs(choice, self._request.logprobs)
        return Token(token, text, logprob, best, self.index)

    def _decode(self, first: Choice, live: LiveState) -> Generator[Event | Turn, Row, None]:
        """Generate after the first token. The next forward is under way while a token is handed
        out, so the last token's state is usually there too."""
        pending = yield from self._forward(first, live)
        while self._finish is None:
            following = None
            if len(self._generated) + 1 < self._room:
                following = yield from self._forward(pending, live)
            yield self._emit(pending)
            self._keep_generated(final=False)
            if len(self._generated) % CLEAR_EVERY == 0:
                mlxlm.release_buffers()
            if following is None:
                break
            pending = following

    def _forward(self, choice: Choice, live: LiveState) -> Generator[Turn, Row, Choice]:
        """Have a chosen token put through the model and choose the next; nothing waits here."""
        try:
            row = yield Forward(choice.token, live.seat, self._alone is not None)
        except StateLost:
            choice = yield from self._recompute(choice, live)
            row = yield Forward(choice.token, live.seat, True)
        self._fed += 1
        self._took.shared_steps += live.seat.batch is not None
        return self._choose(row, choice.token)

    def _recompute(self, choice: Choice, live: LiveState) -> Generator[Turn, Row, Choice]:
        """Compute the state anew, up to the token that is to be put through the model."""
        self._alone, self._lost = "a forward with others failed", True
        live.seat.sit(self._worker.new_caches(), 0)
        tokens = np.concatenate([self._prompt, as_tokens(self._generated)])
        end = len(self._prompt) + self._fed
        worker = self._worker
        prefill = Prefill(self.model, live, tokens, worker.step, False, steps=worker.steps)
        last = prefill.last_start(0, end)
        for _ in prefill.run(0, last):
            yield Wait(lambda: True)
        logits = prefill.last(last, end)
        live.seat.length, self._lost = end, False
        if self._fed < len(self._generated):
            return Choice(mx.array(self._generated[self._fed : self._fed + 1]), choice.row)
        self._chooser.rewind(tokens, self._fed)
        return self._choose(Row.alone(logits))

    def _keep_generated(self, *, final: bool) -> None:
        """Store the state that decoding added: whole blocks as they fill, the tail at the end."""
        if self._recorder is None or not self._fed or self._lost:
            return
        # A forward under way holds the state of its own input, which is known by now or dropped.
        total = len(self._prompt) + min(self._fed, len(self._generated))
        whole = total % self._worker.block_tokens == 0
        if not (final or whole or total - self._kept >= self._recorder.patience):
            return
        tokens = np.concatenate([self._prompt, as_tokens(self._generated)])[:total]
        self._recorder.feed(tokens, self._kept, total, tail=final, decoded=True)
        self._kept = total

    def _hold(self) -> Generator[Turn, Row, None]:
        """Hold the state in the store for as long as the request and its marks say."""
        storage, request, tip = self._storage, self._request, self._tip_hash()
        if storage is None or tip is None:
            return
        ttl = None if self._recorder is None else request.ttl_seconds
        marks = request.marks if request.store and self.index == 0 else ()
        ends = tuple(zip(marks, self.given.mark_ends(marks), strict=True))
        with contextlib.suppress(Cancelled):
            held = yield from hold(storage, request.tenant, self._kept_tokens(), tip, ttl, ends)
            self._took.held, self._took.holds = held

    def _measure(self) -> Generator[Turn, Row, None]:
        """Compare an approximate answer with the exact one, if that is asked for."""
        if not self.raw or not self._took.masked or self._finish in CUT_SHORT:
            return
        count = min(len(self.raw), len(self._generated))
        self._live = self._buffers = None  # the exact state takes its place
        request = exact_request(self._request, count)
        exact = Generation(self._worker, request, given=self.given)
        with contextlib.suppress(Cancelled):
            self._took.kl = yield from measure(exact, self.raw[:count], self._generated[:count])

    # -- accounts ----------------------------------------------------------------------------

    def _generation_room(self, context: int | None) -> int:
        """How many tokens may be generated: the context bounds it, one is always there."""
        if context is None:
            return self._request.max_tokens
        return min(self._request.max_tokens, max(1, context - len(self._prompt)))

    def _stats(self) -> Stats:
        return self._took.stats(
            prompt=len(self._prompt),
            generated=len(self._generated),
            forwarded=self.model.forwarded + self._fed,
            forwarded_prompt=self.model.forwarded,
            alone=self._alone,
            block_tokens=self._worker.block_tokens,
        )

    def _record(self, stats: Stats) -> None:
        if self._storage is None:
            return
        self._storage.speed.took(stats.computed_tokens + stats.refilled_tokens, stats.prefill_ms)
        self._storage.record(
            self._took.record(
                stats,
                self._request,
                self._storage.namespace.id,
                self._tip_hash(),
                cut_short=self._finish in CUT_SHORT,
            ),
            [*self._lookup.tickets, *(self._recorder.tickets if self._recorder else ())],
            self.given.segments,
            self._worker.remember(self._request, self.given, self._generated, "".join(self._said)),
        )

    def _tip_hash(self) -> bytes | None:
        """Hash of the block that the stored state of this request ends in."""
        if self._storage is None or self._finish in CUT_SHORT:
            return None
        namespace, tokens = self._storage.namespace, self._kept_tokens()
        return chain_hashes(namespace.fingerprint, tokens, namespace.block_tokens)[-1]

    def _kept_tokens(self) -> Tokens:
        return np.concatenate([self._prompt, as_tokens(self._generated)])[: self._kept]
