"""Holds a request's state in the store for as long as its client wants it kept."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from engine.events import Hold, Mark
from engine.logits import Row
from engine.turns import Wait
from kvdb.identity import Tokens

if TYPE_CHECKING:
    from engine.storage import Storage


def hold(
    storage: Storage,
    tenant: str,
    tokens: Tokens,
    tip_hash: bytes,
    ttl_seconds: float | None,
    marks: Sequence[tuple[Mark, int]],
) -> Generator[Wait, Row, tuple[bool, tuple[Hold, ...]]]:
    """Hold the chain of ``tokens``, which ``tip_hash`` ends, for ``ttl_seconds`` (None: not at
    all), and up to the end of each mark for its own time; returns what became of both. Waits until
    what is queued is written."""
    if ttl_seconds is None and not marks:
        return False, ()
    yield Wait(storage.written(tokens))
    held = ttl_seconds is not None and storage.hold(tip_hash, ttl_seconds, tenant) == "held"
    return held, tuple(
        Hold(end, mark.ttl_seconds, storage.hold_prefix(tokens, end, mark, tenant))
        for mark, end in marks
    )
