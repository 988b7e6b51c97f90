"""One request on the MLX thread: look up, plan, restore, compute, decode, store, record."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from engine import mlxlm
from engine.boundaries import NO_BOUNDARIES, boundaries
from engine.events import End, Event, FinishReason, Progress, Request, Skip, Stats, Token
from engine.live import LiveState
from engine.plan import Compute, Jump, Plan, Refill, plan
from engine.prefill import Cancelled, Prefill
from engine.prompt.encode import encode
from engine.recorder import Recorder
from engine.restore import Buffers, capacity_for, logits_array, logits_bytes
from engine.sampling import Choice, Chooser, top_logprobs
from engine.text import Output
from kvdb.history import RequestRecord
from kvdb.identity import as_tokens, chain_hashes

if TYPE_CHECKING:
    from engine.storage import Storage
    from engine.worker import Worker
    from kvdb.match import Match
    from kvdb.sequences import Lease

# mlx-lm gives freed buffers back this often while decoding.
CLEAR_EVERY = 256


class Generation:
    """The state of one request, from its tokens to its record."""

    def __init__(
        self,
        worker: Worker,
        request: Request,
        cancelled: Callable[[], bool],
        load_ms: float,
        warmup_ms: float,
    ) -> None:
        self._started, self._started_us = time.perf_counter(), time.time_ns() // 1000
        self._worker = worker
        self._request = request
        self._cancelled = cancelled
        self._load_ms, self._warmup_ms = load_ms, warmup_ms
        loaded = worker.loaded
        self._given = encode(
            request, loaded.prompts, loaded.context, worker.vocabulary, loaded=loaded.tokenizer
        )
        self._prompt = self._given.tokens
        self._room = self._generation_room(loaded.context)
        self._chooser = Chooser(request.sampling, self._prompt, worker.vocabulary)
        self._output = Output(request, loaded.tokenizer, loaded.eos, self._room)
        self._storage = worker.storage if request.read or request.store else None
        self._lease: Lease | None = None
        self._recorder: Recorder | None = None
        self._live: LiveState | None = None
        self._buffers: Buffers | None = None
        self._boundaries = NO_BOUNDARIES
        self._generated: list[int] = []
        self._last_start = 0  # where the forward began that gave the prompt's logits
        self._at = 0  # where prefilling has come to
        self._fed = 0  # generated tokens whose state is, or is about to be, in the caches
        self._kept = len(self._prompt)  # tokens whose blocks were handed to the store
        self._finish: FinishReason | None = None
        self._restored = self._refilled = self._computed = 0
        self._covered = 0  # tokens before those that are computed as the rest of the prompt
        self._skip: Skip = "none"
        self._read_nbytes = 0
        self._touched: tuple[int, ...] = ()
        self._base = worker.model.forwarded
        self._prompt_forwarded: int | None = None
        self._lookup_ms = self._restore_ms = self._prefill_ms = 0.0
        self._first_token_ms: float | None = None
        self._first_sample_ms: float | None = None
        self._logits_at = self._started  # when the first token could be sampled
        self._from_stored_logits = False
        self._damaged = False

    def events(self) -> Iterator[Event]:
        """Run to the end. The lease is released whatever happens."""
        try:
            try:
                yield from self._answer()
            except Cancelled:
                self._finish = "cancelled"
                self._keep_cut_short()
            self._keep_generated(final=True)
        finally:
            if self._storage is not None:
                self._storage.release(self._lease)
        stats = self._stats()
        self._record(stats)
        yield End(self._finish or "length", self._output.rest(), stats)

    def _answer(self) -> Iterator[Event]:
        steps, logits = self._look_up()
        choice = None
        if logits is not None:
            # Sampled before any payload is read: the state is restored behind it.
            self._from_stored_logits = True
            choice = self._choose(logits)
            yield self._emit(choice)
        if self._finish is not None:
            self._settle(steps)
            return
        steps, live = self._restore(steps)
        yield Progress(steps.restored, len(self._prompt))
        logits = yield from self._compute(steps, live)
        raw = None if logits is None else logits_bytes(logits)
        if choice is None and logits is not None:
            choice = self._choose(logits)
            yield self._emit(choice)
        if self._recorder is not None and raw is not None:
            # What the last forward computed, and the logits after it.
            end = len(self._prompt)
            self._recorder.feed(self._prompt, self._last_start, end, tail=True, logits=raw)
        if self._finish is None and choice is not None:
            yield from self._decode(choice, live)

    # -- what is stored ----------------------------------------------------------------------

    def _look_up(self) -> tuple[Plan, mx.array | None]:
        """What to do, and the stored logits that the answer begins from, if it does."""
        began = time.perf_counter()
        self._warmup_ms += (began - self._started) * 1e3
        if self._storage is not None and self._request.read:
            self._lease = self._storage.lease(
                self._prompt, self._request.reuse, self._request.tenant
            )
        steps, logits = self._plan(), None
        if steps.stored_logits:
            logits = self._stored_logits()
            if logits is None:
                steps = self._plan(logits_ok=False)
        self._lookup_ms = _since(began)
        self._logits_at = time.perf_counter()
        return steps, logits

    def _plan(self, **without: Any) -> Plan:
        found = None if self._lease is None else self._lease.match
        needs = self._worker.needs
        return plan(found, len(self._prompt), self._request.reuse, needs, **without)

    def _stored_logits(self) -> mx.array | None:
        layout = self._worker.layout
        location = None if self._lease is None else self._lease.match.logits
        if self._storage is None or location is None or layout is None or layout.logits is None:
            return None
        raw = self._storage.read_part(location)
        return None if raw is None else logits_array(raw, layout.logits)

    def _settle(self, steps: Plan) -> None:
        """Take a plan as what is done: what it restores counts, and counts as used."""
        self._restored, self._skip, self._covered = steps.restored, steps.skip, steps.start
        if self._lease is not None:
            match = self._lease.match
            used = [match.blocks[index].id for index in steps.reads]
            if steps.shared and match.shared is not None:
                used.append(match.shared.block.id)
            self._touched = tuple(used)

    def _restore(self, steps: Plan) -> tuple[Plan, LiveState]:
        """Read what the plan restores; what cannot be read makes another plan, the request goes
        on."""
        began = time.perf_counter()
        worker, layout, exact = self._worker, self._worker.layout, self._request.reuse == "exact"
        if layout is None:
            self._live = LiveState(None, worker.new_caches())
            self._settle(steps)
            return steps, self._live
        self._buffers = Buffers(layout, capacity_for(len(self._prompt), self._room))
        if self._storage is not None and self._lease is not None:
            steps = self._read(steps, self._buffers, self._storage, self._lease.match)
        self._live = self._buffers.live(worker.new_caches())
        self._settle(steps)
        prompt = len(self._prompt)
        messages = self._message_ends() if layout.states and steps.start < prompt else ()
        self._boundaries = boundaries(layout, worker.block_tokens, prompt, messages, exact=exact)
        self._restore_ms = _since(began)
        if self._storage is not None and self._request.store:
            known = {self._lease.match.blocks[i].end for i in steps.reads} if self._lease else set()
            self._recorder = Recorder(
                self._storage,
                self._live,
                self._boundaries,
                known,
                exact=exact,
                running=None if self._lease is None else self._lease.sequence,
            )
        return steps, self._live

    def _message_ends(self) -> tuple[int, ...]:
        """Where another request may go on differently: as it was told, and behind the last message
        before the answer."""
        parts = self._given.segments() if self._request.messages else []
        ends = [part.end for part in parts if part.kind in ("system", "message")]
        return (*self._request.boundaries, *ends[-1:])

    def _read(self, steps: Plan, buffers: Buffers, storage: Storage, match: Match) -> Plan:
        """Read until a plan has all that it needs: each failure makes one that needs less."""
        lost: frozenset[tuple[int, str]] = frozenset()
        shared_ok = True
        while wants := buffers.wants(steps, match):
            read = storage.read(match, wants)
            self._read_nbytes += read.nbytes
            if not read.lost and read.shared_ok:
                break
            buffers.read([index for index in steps.reads if index not in dict(read.lost)])
            self._damaged = True
            lost, shared_ok = lost | read.lost, shared_ok and read.shared_ok
            # Stored logits that could not be read before cannot be now.
            steps = self._plan(lost=lost, shared_ok=shared_ok, logits_ok=bool(self._generated))
        return steps

    # -- computing the prompt ----------------------------------------------------------------

    def _compute(self, steps: Plan, live: LiveState) -> Generator[Event, None, mx.array | None]:
        """Refill and compute; returns the raw logits of the last token if it was computed."""
        began = time.perf_counter()
        worker, exact = self._worker, self._request.reuse == "exact"
        step = worker.block_tokens if exact else worker.step
        prefill = Prefill(
            worker.model, live, self._prompt, step, exact, self._cancelled, self._boundaries
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
                    if self._cancelled():
                        raise Cancelled
                    logits = prefill.last(self._last_start, part.end)
                    self._computed += part.end - self._last_start
        finally:
            self._prefill_ms = _since(began)
            self._logits_at = time.perf_counter()
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
                self._refilled += done - at
            else:
                self._computed += done - at
            if self._recorder is not None:
                self._recorder.feed(self._prompt, at, done)
            at = self._at = done
            yield Progress(self._restored + self._refilled + self._computed, len(self._prompt))

    def _keep_cut_short(self) -> None:
        """A prompt that was cancelled leaves its state where it got to, if that is where the
        caches stand."""
        if self._recorder is not None and self._at and not self._generated:
            self._recorder.keep_state(self._prompt, self._at)

    # -- generating --------------------------------------------------------------------------

    def _choose(self, logits: mx.array, before: mx.array | None = None) -> Choice:
        if self._worker.observe is not None:
            self._worker.observe(logits)
        return self._chooser.choose(logits, before)

    def _emit(self, choice: Choice) -> Token:
        token = int(mlxlm.scalar(choice.token))
        if self._first_token_ms is None:
            self._first_token_ms = _since(self._started)
            self._first_sample_ms = _since(self._logits_at)
        self._generated.append(token)
        text, self._finish = self._output.feed(token)
        if self._request.logprobs is None:
            return Token(token, text)
        logprob, best = top_logprobs(choice, self._request.logprobs)
        return Token(token, text, logprob, best)

    def _decode(self, first: Choice, live: LiveState) -> Iterator[Event]:
        """Generate after the first token. The next forward is under way while a token is handed
        out, so the last token's state is usually there too."""
        self._prompt_forwarded = self._worker.model.forwarded - self._base
        pending = self._forward(first, live)
        while self._finish is None:
            if self._cancelled():
                raise Cancelled
            following = None
            if len(self._generated) + 1 < self._room:
                following = self._forward(pending, live)
            yield self._emit(pending)
            self._keep_generated(final=False)
            if len(self._generated) % CLEAR_EVERY == 0:
                mlxlm.release_buffers()
            if following is None:
                break
            pending = following

    def _forward(self, choice: Choice, live: LiveState) -> Choice:
        """Put a chosen token through the model and choose the next; nothing waits here."""
        logits = self._worker.model(choice.token[None], live.caches)[:, -1, :]
        self._fed += 1
        following = self._choose(logits, choice.token)
        mlxlm.start(following.token)
        return following

    def _keep_generated(self, *, final: bool) -> None:
        """Store the state that decoding added: whole blocks as they fill, the tail at the end."""
        if self._recorder is None or not self._fed:
            return
        # A forward under way holds the state of its own input, which is known by now or dropped.
        total = len(self._prompt) + min(self._fed, len(self._generated))
        whole = total % self._worker.block_tokens == 0
        if not (final or whole or total - self._kept >= self._recorder.patience):
            return
        tokens = np.concatenate([self._prompt, as_tokens(self._generated)])[:total]
        self._recorder.feed(tokens, self._kept, total, tail=final, decoded=True)
        self._kept = total

    # -- accounts ----------------------------------------------------------------------------

    def _generation_room(self, context: int | None) -> int:
        """How many tokens may be generated: the context bounds it, one is always there."""
        if context is None:
            return self._request.max_tokens
        return min(self._request.max_tokens, max(1, context - len(self._prompt)))

    def _stats(self) -> Stats:
        forwarded = self._worker.model.forwarded - self._base
        at_prompt = self._prompt_forwarded
        return Stats(
            prompt_tokens=len(self._prompt),
            matched_tokens=self._matched(),
            restored_tokens=self._restored,
            refilled_tokens=self._refilled,
            computed_tokens=self._computed,
            generated_tokens=len(self._generated),
            forwarded_tokens=forwarded,
            forwarded_prompt_tokens=forwarded if at_prompt is None else at_prompt,
            skip=self._skip,
            miss_reason=self._miss_reason(),
            bytes_read=self._read_nbytes,
            load_ms=self._load_ms,
            warmup_ms=self._warmup_ms,
            lookup_ms=self._lookup_ms,
            restore_ms=self._restore_ms,
            prefill_ms=self._prefill_ms,
            first_sample_ms=self._first_sample_ms,
            behind_ms=self._restore_ms + self._prefill_ms if self._from_stored_logits else 0.0,
            first_token_ms=self._first_token_ms,
            total_ms=_since(self._started),
        )

    def _miss_reason(self) -> str | None:
        if self._damaged:
            return "damaged"
        if self._lease is None:
            return None
        match = self._lease.match
        # Blocks are there that no plan could use: no state, or no window, is stored at their end.
        if self._covered + self._worker.block_tokens < match.live_prefix_tokens:
            return "no_boundary"
        return match.miss_reason

    def _record(self, stats: Stats) -> None:
        if self._storage is None:
            return
        self._storage.record(
            RequestRecord(
                started_at=self._started_us,
                namespace_id=self._storage.namespace.id,
                # A cancelled prompt counts as far as it got.
                prompt_tokens=self._restored + self._refilled + self._computed,
                matched_tokens=stats.matched_tokens,
                restored_tokens=self._restored,
                refilled_tokens=self._refilled,
                computed_tokens=self._computed,
                generated_tokens=len(self._generated),
                skip=self._skip,
                tenant=self._request.tenant,
                client=self._request.client,
                miss_reason=stats.miss_reason,
                deepest_block_id=None if self._lease is None else self._lease.match.tip_id,
                tip_hash=self._tip_hash(),
                bytes_read=self._read_nbytes,
                load_ms=stats.load_ms,
                warmup_ms=stats.warmup_ms,
                lookup_ms=stats.lookup_ms,
                restore_ms=stats.restore_ms,
                prefill_ms=stats.prefill_ms,
                first_sample_ms=stats.first_sample_ms,
                behind_ms=stats.behind_ms,
                first_token_ms=stats.first_token_ms,
                total_ms=stats.total_ms,
                touched=self._touched,
                unstored=self._unstored(),
            ),
            () if self._recorder is None else self._recorder.tickets,
            self._given.segments,
        )

    def _unstored(self) -> str | None:
        """Why the state of this request was not kept, where that was meant."""
        if not self._request.store:
            return "store_off"
        return "cancelled" if self._finish == "cancelled" else None

    def _matched(self) -> int:
        """Tokens of the prompt that the store knew, holes included."""
        if self._lease is None:
            return 0
        match = self._lease.match
        return max(match.token_count, match.reach)

    def _tip_hash(self) -> bytes | None:
        """Hash of the block that the stored state of this request ends in."""
        if self._storage is None or self._finish == "cancelled":
            return None
        namespace = self._storage.namespace
        tokens = np.concatenate([self._prompt, as_tokens(self._generated)])[: self._kept]
        return chain_hashes(namespace.fingerprint, tokens, namespace.block_tokens)[-1]


def _since(began: float) -> float:
    """Milliseconds since a reading of the performance counter."""
    return (time.perf_counter() - began) * 1e3
