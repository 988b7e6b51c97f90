"""Raw logits of a forward, and what choosing tokens derives from them for all its requests."""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx

from engine import mlxlm


class Logits:
    """Logits ``(rows, vocabulary)`` of a forward of several requests. Nothing is evaluated here."""

    def __init__(self, raw: mx.array) -> None:
        self.raw = raw

    @cached_property
    def logprobs(self) -> mx.array:
        return self.raw - mx.logsumexp(self.raw, axis=-1, keepdims=True)

    @cached_property
    def best(self) -> mx.array:
        return mx.argmax(self.logprobs, axis=-1)


def divergence(exact: mx.array, other: mx.array) -> float:
    """Mean KL(exact ‖ other) in nats of raw logits, both ``(rows, vocabulary)``."""
    a = Logits(exact.astype(mx.float32)).logprobs
    b = Logits(other.astype(mx.float32)).logprobs
    weighted = mx.where(mx.isinf(a), 0.0, mx.exp(a) * (a - b))
    return float(mlxlm.scalar(mx.mean(mx.sum(weighted, axis=-1))))


class Row:
    """One request's part of them; its arrays keep the axis of rows, as one long."""

    def __init__(self, logits: Logits, index: int) -> None:
        self._logits = logits
        self._index = index

    @staticmethod
    def alone(raw: mx.array) -> Row:
        """Of logits ``(1, vocabulary)``."""
        return Row(Logits(raw), 0)

    @property
    def raw(self) -> mx.array:
        return self._own(self._logits.raw)

    @property
    def logprobs(self) -> mx.array:
        return self._own(self._logits.logprobs)

    @property
    def best(self) -> mx.array:
        """The likeliest token, ``(1,)``."""
        return self._own(self._logits.best)

    def _own(self, of_all: mx.array) -> mx.array:
        return of_all if of_all.shape[0] == 1 else of_all[self._index : self._index + 1]
