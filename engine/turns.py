"""What a request's coroutine hands to the scheduler besides events: what concerns others, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from engine.batch import Seat
from engine.events import FinishReason


@dataclass(frozen=True, slots=True)
class Forward:
    """``token``, ``(1,)`` and maybe pending, is to go through the model behind ``seat``'s state.

    The logits after it are sent back. ``alone``: in a forward of its own.
    """

    token: mx.array
    seat: Seat
    alone: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Others may have their turn, and nothing is to be done here until ``ready`` says so."""

    ready: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """The whole prompt has its state: others with the same prompt may share it now.

    ``logits``, ``(1, vocabulary)``, are the raw ones after its last token."""

    logits: mx.array


class Cancelled(Exception):
    """Thrown into a request's coroutine where it waits: it ends with ``reason``. Internal."""

    def __init__(self, reason: FinishReason) -> None:
        super().__init__(reason)
        self.reason: FinishReason = reason


class StateLost(Exception):
    """Thrown into a request's coroutine instead of logits: a forward of several failed, and their
    state with it. It computes its own anew, and decodes alone from then on. Internal."""


Turn = Forward | Wait | PromptEnd
