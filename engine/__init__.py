"""mlx-lm inference that consults a kvdb store. Importing this imports no MLX."""

from __future__ import annotations

from engine.engine import Engine, EngineClosed
from engine.events import (
    End,
    Event,
    Load,
    LogitsProcessor,
    Message,
    Progress,
    Request,
    Sampling,
    Stats,
    Token,
)
from engine.guide import CallForm, Guide
from engine.models import ModelOptions
from engine.options import EngineOptions, TenantLimits
from engine.pool import ModelBusy, Pool, PooledModel, PoolOptions

__all__ = [
    "CallForm",
    "End",
    "Engine",
    "EngineClosed",
    "EngineOptions",
    "Event",
    "Guide",
    "Load",
    "LogitsProcessor",
    "Message",
    "ModelBusy",
    "ModelOptions",
    "Pool",
    "PoolOptions",
    "PooledModel",
    "Progress",
    "Request",
    "Sampling",
    "Stats",
    "TenantLimits",
    "Token",
]
