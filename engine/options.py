"""How an engine computes and stores. Free of MLX."""

from __future__ import annotations

from dataclasses import dataclass

from kvdb.identity import DEFAULT_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Tokens per block and per prefill step (None: the device's default), tenant salt."""

    block_tokens: int = DEFAULT_BLOCK_TOKENS
    step: int | None = None
    salt: bytes = b""
