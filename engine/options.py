"""How an engine computes and stores, and whom it serves when. Free of MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.events import Request
from kvdb.errors import UsageError
from kvdb.identity import DEFAULT_BLOCK_TOKENS

# mlx-lm's cache classes that several requests can decode with together (engine/batchkinds.py). One
# whose model has another one decodes alone, as does one in exact mode.
TOGETHER = ("ArraysCache", "CacheList", "KVCache", "QuantizedKVCache", "RotatingKVCache")
ALONE = ("ChunkedKVCache", "ConcatenateKVCache")


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may have running at once: requests, and tokens of their prompts and answers
    at their longest. None: no limit of its own."""

    requests: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if any(limit is not None and limit < 1 for limit in (self.requests, self.tokens)):
            raise UsageError("A tenant's limits must be at least 1.")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Tokens per block and per prefill step (None: the device's default), tenant salt.

    ``max_running`` requests run at once, up to ``max_waiting`` wait, more are refused (Busy). A
    batch request that has waited for ``ageing_seconds`` gets a share of the turns whatever
    interactive ones there are. ``tenants`` have limits by name, others ``tenant_limits``.
    ``max_memory`` bytes are the most that the process may hold (None: no ceiling); see
    engine/guard.py. ``warm`` are named sequences and prompts to make ready at the start.
    """

    block_tokens: int = DEFAULT_BLOCK_TOKENS
    step: int | None = None
    salt: bytes = b""
    max_memory: int | None = None
    warm: tuple[str | Request, ...] = ()
    max_running: int = 8
    max_waiting: int = 1024
    ageing_seconds: float = 30.0
    tenant_limits: TenantLimits = TenantLimits()
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise UsageError(f"max_running must be at least 1, not {self.max_running}.")
        if self.max_waiting < 0:
            raise UsageError(f"max_waiting must not be negative, not {self.max_waiting}.")
