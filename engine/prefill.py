"""kvdb's own prefill loop: steps for the model, and whatever else goes on between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine import mlxlm
from kvdb.errors import UsageError
from kvdb.identity import Tokens

CPU_STEP = 256
GPU_STEP = 2048
# A last step up to this long gives its logits itself; a longer one leaves its last token to a
# forward of its own, which costs less than a vocabulary-wide product for every position.
SHORT_STEP = 32


@dataclass(frozen=True, slots=True)
class Prefill:
    """How ranges of one prompt are computed. ``exact`` means one forward per step, whatever its
    length, so that the bits depend on tokens and step only. ``step`` is asked before each one."""

    model: mlxlm.CountingModel
    caches: Sequence[Any]
    tokens: Tokens
    step: Callable[[], int]
    exact: bool

    def run(self, start: int, end: int) -> Iterator[int]:
        """Compute the state of tokens ``start`` to ``end`` over what lies before them; yield the
        end of every finished step."""
        mlxlm.set_offset(self.caches, start)
        at = start
        while at < end:
            step = self.step()
            stop = min(end, (at // step + 1) * step)
            self._forward(at, stop)
            mlxlm.evaluate(self.caches)
            mlxlm.release_buffers()
            at = stop
            yield at

    def last(self, start: int, end: int) -> mx.array:
        """Compute tokens ``start`` to ``end``, at most one step, and return the raw logits of the
        last one: ``(1, vocabulary)``, evaluated."""
        mlxlm.set_offset(self.caches, start)
        if not self.exact and end - start > SHORT_STEP:
            self._forward(start, end - 1)
            mlxlm.evaluate(self.caches)
            start = end - 1
        logits = self._forward(start, end)[:, -1, :]
        mlxlm.evaluate(self.caches, logits)
        mlxlm.release_buffers()
        return logits

    def last_step_start(self, start: int, end: int) -> int:
        """Where the step that holds the last token of ``start`` to ``end`` begins."""
        step = self.step()
        return max(start, (end - 1) // step * step)

    def _forward(self, start: int, end: int) -> mx.array:
        return self.model(mx.array(self.tokens[start:end])[None], self.caches)


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
