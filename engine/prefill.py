"""kvdb's own prefill loop: steps for the model, and whatever else goes on between two of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import mlx.core as mx

from engine import mlxlm
from engine.boundaries import NO_BOUNDARIES, Boundaries
from engine.guard import Steps
from engine.live import LiveState
from kvdb.errors import UsageError
from kvdb.identity import Tokens

CPU_STEP = 256
GPU_STEP = 2048
# A last step up to this long gives its logits itself; a longer one leaves its last token to a
# forward of its own, which costs less than a vocabulary-wide product for every position.
SHORT_STEP = 32


@dataclass(frozen=True, slots=True)
class Prefill:
    """How ranges of one prompt are computed, with the caches standing where each begins.

    ``exact`` means one forward per step, whatever its length, so that the bits depend on tokens
    and step only; otherwise a forward also ends at each of ``boundaries``, and ``steps`` may make
    steps shorter than ``step``.
    """

    model: mlxlm.CountingModel
    live: LiveState
    tokens: Tokens
    step: int
    exact: bool
    boundaries: Boundaries = NO_BOUNDARIES
    steps: Steps | None = None

    def run(self, start: int, end: int) -> Iterator[int]:
        """Compute the state of tokens ``start`` to ``end`` over what lies before them; yield the
        end of every finished step. Raises OutOfMemory before one that does not fit."""
        at = start
        while at < end:
            step = self.step if self.steps is None else self.steps.fit(self.step, at)
            stop = min(end, self._step_end(at, step))
            with nullcontext() if self.steps is None else self.steps.watch(stop - at, stop):
                self._forward(at, stop)
                self.live.evaluate()
            mlxlm.release_buffers()
            at = stop
            yield at

    def last(self, start: int, end: int) -> mx.array:
        """Compute tokens ``start`` to ``end`` in one forward and return the raw logits of the last
        one: ``(1, vocabulary)``, evaluated."""
        logits = self._forward(start, end)[:, -1, :]
        self.live.evaluate(logits)
        mlxlm.release_buffers()
        return logits

    def last_start(self, start: int, end: int) -> int:
        """Where the forward begins that gives the logits of the last token of ``start`` to
        ``end``."""
        at = start
        while (stop := self._step_end(at, self.step)) < end:
            at = stop
        return at if self.exact or end - at <= SHORT_STEP else end - 1

    def _step_end(self, at: int, step: int) -> int:
        stop = (at // step + 1) * step
        boundary = None if self.exact else self.boundaries.after(at)
        return stop if boundary is None else min(stop, boundary)

    def _forward(self, start: int, end: int) -> mx.array:
        return self.model(mx.array(self.tokens[start:end])[None], self.live.caches)


def check_step(step: int | None, block_tokens: int) -> int:
    """The step to use (by default the device's, and at least a block), or UsageError: it must be
    a multiple of ``block_tokens``, so that every step ends where a block does."""
    if step is None:
        return max(GPU_STEP if mlxlm.on_gpu() else CPU_STEP, block_tokens)
    if step < block_tokens or step % block_tokens:
        raise UsageError(
            f"The step must be a multiple of block_tokens ({block_tokens}), not {step}."
        )
    return step
