"""How an engine computes and stores. Free of MLX."""

from __future__ import annotations

from dataclasses import dataclass

from engine.events import Request
from kvdb.identity import DEFAULT_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Tokens per block and per prefill step (None: the device's default), tenant salt.

    ``max_memory`` bytes are the most that the process may hold (None: no ceiling); see
    engine/guard.py. ``warm`` are named sequences and prompts to make ready at the start.
    """

    block_tokens: int = DEFAULT_BLOCK_TOKENS
    step: int | None = None
    salt: bytes = b""
    max_memory: int | None = None
    warm: tuple[str | Request, ...] = ()
