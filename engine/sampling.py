"""From raw logits to tokens: mlx-lm's processors and samplers, one random stream per request."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from engine import mlxlm
from engine.events import LogitsProcessor, Sampling
from engine.logits import Row
from kvdb.errors import UsageError
from kvdb.identity import Tokens

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Choice:
    """A sampled token, still pending, ``(1,)``, and what it was chosen from."""

    token: mx.array
    row: Row


class Chooser:
    """Chooses the tokens of one request, in order.

    Processors see the prompt and every token chosen before, as in a cold run, whatever was
    restored. The random key of token i depends on the seed and i only: mlx's random state is
    global to a thread, and would otherwise carry one request's draws into another's. Of several
    answers to one prompt the first draws as a single one would, the others by their index.

    ``processors`` are a request's own, and run after those of ``sampling``; they see the tokens
    chosen before as numbers, so that choosing waits for the last of them (never for the forward
    under way).
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Tokens,
        vocabulary: int,
        index: int = 0,
        processors: Iterable[LogitsProcessor] = (),
    ) -> None:
        if sampling.top_k >= vocabulary:
            raise UsageError(f"top_k must be below the vocabulary's size ({vocabulary}).")
        for token in sampling.logit_bias or {}:
            # MLX does not check the bounds of an index on a CPU.
            if type(token) is not int or not 0 <= token < vocabulary:
                raise UsageError(
                    f"logit_bias names {token!r}, which is no token id below {vocabulary}."
                )
        self._random = sampling.temperature > 0
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._seed = _mix(seed, -index) if index else seed
        self._position = 0
        self._sampler: Callable[[mx.array], mx.array] = make_sampler(
            temp=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            top_k=sampling.top_k,
        )
        self._processors: list[Callable[[mx.array, mx.array], mx.array]] = make_logits_processors(
            dict(sampling.logit_bias) if sampling.logit_bias else None,
            sampling.repetition_penalty,
            sampling.repetition_context,
            sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
        )
        self._history = mx.array(prompt) if self._processors else None
        self._prompt_tokens = len(prompt)
        self._own = list(processors)
        self._chosen: list[int] = []  # kept for the request's own processors

    def add(self, processor: LogitsProcessor) -> None:
        """Have one more, behind all others. Before the first token is chosen."""
        self._own.append(processor)

    def choose(self, row: Row, before: mx.array | None = None) -> Choice:
        """Choose from raw logits; ``before`` is the token chosen last. Nothing is evaluated
        here."""
        if before is not None:
            if self._history is not None:
                self._history = mx.concatenate([self._history, before.astype(mx.uint32)])
            if self._own:
                self._chosen.append(int(mlxlm.scalar(before)))
        if self._processors or self._own:
            # Some processors assign into what they get: the raw logits must stay as they are.
            logits = row.raw + 0
            if self._history is not None:
                for process in self._processors:
                    logits = process(self._history, logits)
            for own in self._own:
                logits = own(tuple(self._chosen), logits)
            row = Row.alone(logits)
        self._position += 1
        if not self._random:
            return Choice(row.best, row)
        mx.random.seed(_mix(self._seed, self._position - 1))
        return Choice(self._sampler(row.logprobs), row)

    def rewind(self, tokens: Tokens, chosen: int) -> None:
        """Go back to where ``chosen`` tokens were chosen; ``tokens`` are the prompt and these."""
        self._position = chosen
        self._history = mx.array(tokens) if self._processors else None
        self._chosen = tokens[self._prompt_tokens :].tolist() if self._own else []


def top_logprobs(choice: Choice, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The chosen token's log probability, and the ``count`` most likely tokens', best first."""
    values = np.array(choice.row.logprobs[0].astype(mx.float32))
    chosen = float(values[int(mlxlm.scalar(choice.token))])
    count = min(count, len(values))
    if count == 0:
        return chosen, ()
    best = np.argpartition(values, len(values) - count)[-count:].tolist()
    ranked = sorted(
        ((token, float(values[token])) for token in best), key=lambda pair: (-pair[1], pair[0])
    )
    return chosen, tuple(pair for pair in ranked if math.isfinite(pair[1]))


def _mix(seed: int, position: int) -> int:
    """splitmix64 of both: neighbouring seeds and positions give unrelated keys."""
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 1) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
