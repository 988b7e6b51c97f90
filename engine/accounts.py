"""What one answer took: counted as it goes, told at its end as Stats and in a row of history."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.events import Hold, Request, Skip, Stats
from engine.plan import Plan
from engine.remote import RemoteUse
from kvdb.history import RequestRecord

if TYPE_CHECKING:
    from kvdb.match import Match


class Accounts:
    """Counters and times of one answer. ``restored``, ``refilled``, ``computed`` and ``masked``
    are tokens of the prompt; ``match`` is what the store had of it."""

    def __init__(self, load_ms: float, warmup_ms: float) -> None:
        self._started, self._started_us = time.perf_counter(), time.time_ns() // 1000
        self._load_ms, self._warmup_ms = load_ms, warmup_ms
        self._ready = self._logits_at = self._started
        self._skip: Skip = "none"
        self._covered = 0  # tokens before those that are computed as the rest of the prompt
        self._touched: tuple[int, ...] = ()
        self._behind = False  # the state is restored behind a token from stored logits
        self._first_token_ms: float | None = None
        self._first_sample_ms: float | None = None
        self.match: Match | None = None
        self.restored = self.refilled = self.computed = self.masked = 0
        self.unmasked: str | None = None  # why holes of an approximate request were refilled
        self.kl: float | None = None
        self.bytes_read = self.bytes_ram = 0
        self.remote = RemoteUse()
        self.remote_blocks: frozenset[int] = frozenset()  # of the match, by index
        self.damaged = False
        self.shared = False  # another request computed the prompt
        self.shared_steps = 0
        self.held = False
        self.holds: tuple[Hold, ...] = ()
        self.queued_ms = self.lookup_ms = self.restore_ms = self.prefill_ms = 0.0

    @property
    def done(self) -> int:
        """Tokens of the prompt that have their state, or go without."""
        return self.restored + self.refilled + self.computed + self.masked

    def ready(self) -> None:
        """The prompt is encoded: what follows may have to wait."""
        self._warmup_ms += since(self._started)
        self._ready = time.perf_counter()

    def begin(self) -> None:
        self.queued_ms = since(self._ready)

    def share(self, prompt: int, other: Accounts) -> None:
        """Its prompt's state is another request's."""
        self.match, self.masked, self.unmasked = other.match, other.masked, other.unmasked
        self.shared, self.restored, self._covered = True, prompt - self.masked, prompt
        self._skip = "approximate" if self.masked else "full"

    def settle(self, steps: Plan, *, ends: bool = False) -> None:
        """Take a plan as what is done: what it restores counts, and counts as used. An answer that
        ``ends`` with its first token, from stored logits, needs nothing else."""
        self.restored, self.masked = steps.restored, steps.masked
        self._skip, self._covered = steps.skip, steps.start
        if ends:
            self.restored, self.masked, self._skip = steps.start, 0, "full"
            self.unmasked = None
        if self.match is not None:
            blocks = [self.match.blocks[index] for index in steps.reads]
            used = [block.id for block in blocks if block.id >= 0]
            remote = sum(block.token_count for block in blocks if block.index in self.remote_blocks)
            self.remote.tokens = min(remote, self.restored)
            if steps.shared and self.match.shared is not None:
                used.append(self.match.shared.block.id)
            self._touched = tuple(used)

    def set_up(self, ms: float) -> None:
        """The caches stand ready: what is restored took this long. Where nothing was, that is a
        part of computing the prompt."""
        if self.restored or self.bytes_read or self.bytes_ram or self.remote.nbytes:
            self.restore_ms = ms
        else:
            self.prefill_ms = ms

    def have_logits(self, *, stored: bool = False) -> None:
        """The first token can be sampled now."""
        self._logits_at = time.perf_counter()
        self._behind = stored or self._behind

    def token(self) -> None:
        """A token was generated: the first one counts."""
        if self._first_token_ms is None:
            self._first_token_ms = since(self._started)
            self._first_sample_ms = since(self._logits_at)

    def stats(
        self,
        *,
        prompt: int,
        generated: int,
        forwarded: int,
        forwarded_prompt: int,
        alone: str | None,
        block_tokens: int,
    ) -> Stats:
        return Stats(
            prompt_tokens=prompt,
            matched_tokens=prompt if self.shared else self._matched(),
            restored_tokens=self.restored,
            refilled_tokens=self.refilled,
            computed_tokens=self.computed,
            masked_tokens=self.masked,
            generated_tokens=generated,
            forwarded_tokens=forwarded,
            forwarded_prompt_tokens=forwarded_prompt,
            skip=self._skip,
            miss_reason=self._miss_reason(block_tokens),
            bytes_read=self.bytes_read,
            bytes_ram=self.bytes_ram,
            bytes_remote=self.remote.nbytes,
            remote_tokens=self.remote.tokens,
            shared_steps=self.shared_steps,
            alone=alone,
            held=self.held,
            holds=self.holds,
            unmasked=self.unmasked,
            kl=self.kl,
            load_ms=self._load_ms,
            warmup_ms=self._warmup_ms,
            queued_ms=self.queued_ms,
            lookup_ms=self.lookup_ms,
            restore_ms=self.restore_ms,
            prefill_ms=self.prefill_ms,
            first_sample_ms=self._first_sample_ms,
            behind_ms=self.restore_ms + self.prefill_ms if self._behind else 0.0,
            first_token_ms=self._first_token_ms,
            total_ms=since(self._started),
        )

    def record(
        self,
        stats: Stats,
        request: Request,
        namespace_id: int,
        tip_hash: bytes | None,
        *,
        cut_short: bool,
    ) -> RequestRecord:
        """The row of history; ``unstored`` says why state was not kept, where it was meant."""
        unstored = "cancelled" if cut_short else "approximate" if self.masked else None
        return RequestRecord(
            started_at=self._started_us,
            namespace_id=namespace_id,
            prompt_tokens=self.done,  # a cancelled prompt counts as far as it got
            matched_tokens=stats.matched_tokens,
            restored_tokens=self.restored,
            refilled_tokens=self.refilled,
            computed_tokens=self.computed,
            masked_tokens=self.masked,
            generated_tokens=stats.generated_tokens,
            skip=stats.skip,
            tenant=request.tenant,
            client=request.client,
            miss_reason=stats.miss_reason,
            deepest_block_id=None if self.match is None else self.match.tip_id,
            tip_hash=tip_hash,
            bytes_read=stats.bytes_read,
            bytes_ram=stats.bytes_ram,
            bytes_remote=stats.bytes_remote,
            remote=self.remote.name,
            remote_decision=self.remote.decision,
            remote_tokens=stats.remote_tokens,
            remote_ms=self.remote.ms,
            load_estimate_ms=self.remote.load_ms,
            compute_estimate_ms=self.remote.compute_ms,
            load_ms=stats.load_ms,
            warmup_ms=stats.warmup_ms,
            queued_ms=stats.queued_ms,
            lookup_ms=stats.lookup_ms,
            restore_ms=stats.restore_ms,
            prefill_ms=stats.prefill_ms,
            first_sample_ms=stats.first_sample_ms,
            behind_ms=stats.behind_ms,
            first_token_ms=stats.first_token_ms,
            total_ms=stats.total_ms,
            kl=self.kl,
            touched=self._touched,
            unstored=unstored if request.store else "store_off",
        )

    def _matched(self) -> int:
        """Tokens of the prompt that the store knew, holes included."""
        return 0 if self.match is None else max(self.match.token_count, self.match.reach)

    def _miss_reason(self, block_tokens: int) -> str | None:
        if self.damaged:
            return "damaged"
        if self.match is None or self.shared:
            return None
        if self.remote.decision == "loaded" and self._skip == "full":
            return None  # all of it was there, if not here
        if self.remote.decision == "failed":
            return self.match.miss_reason
        # Blocks are there that no plan could use: no state, or no window, is stored at their end.
        if self._covered + block_tokens < self.match.live_prefix_tokens:
            return "no_boundary"
        return self.match.miss_reason


def since(began: float) -> float:
    """Milliseconds since a reading of the performance counter."""
    return (time.perf_counter() - began) * 1e3
