"""How far the answer of an approximate skip is from the exact one."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.events import Request, Sampling
from engine.logits import Row, divergence
from engine.turns import Wait

if TYPE_CHECKING:
    from engine.generation import Generation

# The answers are compared over this many first tokens.
KL_TOKENS = 16


def exact_request(request: Request, tokens: int) -> Request:
    """``request`` for the state that ``tokens`` tokens of an answer are compared by."""
    return replace(
        request,
        approximate=False,
        measure_kl=False,
        processors=(),
        guide=None,
        sampling=Sampling(),
        stop=(),
        stop_tokens=(),
        ignore_eos=True,
        max_tokens=tokens + 1,
        n=1,
    )


def measure(
    exact: Generation, raw: Sequence[mx.array], tokens: Sequence[int]
) -> Generator[Wait, Row, float]:
    """Mean KL(exact ‖ approximate) of the raw logits that ``tokens`` were chosen from. The exact
    state is computed a step at a time, and stored where the request stores."""
    exact.raw = []
    try:
        for item in exact.begin():
            yield item if isinstance(item, Wait) else Wait(lambda: True)
    finally:
        exact.release()
    logits = exact.raw[0]
    if len(tokens) > 1:
        behind = exact.model(mx.array(list(tokens[:-1]))[None], exact.seat.caches)
        logits = mx.concatenate([logits, behind[0]])
    return divergence(logits, mx.concatenate(list(raw)))
