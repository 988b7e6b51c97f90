"""mlx-lm inference that consults a kvdb store. Importing this imports no MLX."""

from __future__ import annotations

from engine.engine import Engine, EngineClosed, Handle, Sink
from engine.events import (
    End,
    Event,
    Hold,
    Load,
    LogitsProcessor,
    Mark,
    Message,
    Progress,
    Request,
    Sampling,
    Stats,
    Token,
)
from engine.guide import CallForm, Guide
from engine.models import ModelFacts, ModelOptions
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
    "Handle",
    "Hold",
    "Load",
    "LogitsProcessor",
    "Mark",
    "Message",
    "ModelBusy",
    "ModelFacts",
    "ModelOptions",
    "Pool",
    "PoolOptions",
    "PooledModel",
    "Progress",
    "Request",
    "Sampling",
    "Sink",
    "Stats",
    "TenantLimits",
    "Token",
]
