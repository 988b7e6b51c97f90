"""Time and identity as parameters, so that tests decide both."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field


def _now_us() -> int:
    return time.time_ns() // 1000


def _uuid() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Environment:
    """``now_us``: wall time in Unix microseconds, for people only. ``seconds``: a monotonic clock
    for durations and deadlines. ``new_uuid``: 32 hex digits."""

    now_us: Callable[[], int] = field(default=_now_us)
    seconds: Callable[[], float] = field(default=time.monotonic)
    new_uuid: Callable[[], str] = field(default=_uuid)
