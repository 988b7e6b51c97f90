"""Replay a trace: every policy at every capacity."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvdb.errors import UsageError
from kvdb.simulate.baselines import BASELINES
from kvdb.simulate.sql_policy import SqlPolicy
from kvdb.simulate.trace import Trace

REPORT_EVERY = 64


class Policy(Protocol):
    """A cache of a fixed number of blocks that sees one request after the other."""

    def request(self, chain: Sequence[int]) -> int:
        """Look a chain up, store what is missing, and return how many blocks hit."""

    def close(self) -> None:
        """Release what it holds."""


def _kvdb(trace: Trace, capacity: int) -> Policy:
    return SqlPolicy(capacity)


POLICIES: Mapping[str, Callable[[Trace, int], Policy]] = {"kvdb": _kvdb, **BASELINES}


@dataclass(frozen=True, slots=True)
class Capacity:
    """A share of a trace's different blocks, as it was written: ``5%``."""

    text: str

    @property
    def percent(self) -> float:
        return float(self.text.removesuffix("%"))

    def blocks(self, trace: Trace) -> int:
        return max(1, round(self.percent / 100 * trace.blocks))


@dataclass(frozen=True, slots=True)
class Result:
    """One policy at one capacity: ``hit_ratio`` is the share of references that hit."""

    capacity: str
    capacity_blocks: int
    policy: str
    hit_ratio: float


def parse_capacities(text: str) -> list[Capacity]:
    """``1%,5%``. Raises UsageError."""
    made: dict[Capacity, None] = {}
    for piece in text.split(","):
        capacity = Capacity(piece.strip())
        if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?%", capacity.text):
            raise UsageError(f"{piece.strip()!r} is no capacity; write shares such as 1%,5%.")
        if not 0 < capacity.percent <= 100:
            raise UsageError(f"The capacity {capacity.text} is not above 0% and at most 100%.")
        made[capacity] = None
    return list(made)


def parse_policies(text: str) -> list[str]:
    """``kvdb,lru``; all when empty. Raises UsageError."""
    if not text:
        return list(POLICIES)
    names = list(dict.fromkeys(piece.strip().lower() for piece in text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise UsageError(f"{name!r} is no policy; there are {', '.join(POLICIES)}.")
    return names


def replay(
    trace: Trace,
    capacities: Sequence[Capacity],
    policies: Sequence[str],
    report: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Results by policy, then capacity. ``report`` gets (requests done, requests in all)."""
    total = len(trace.requests) * len(capacities) * len(policies)
    results: list[Result] = []
    for name in policies:
        for capacity in capacities:
            done = len(results) * len(trace.requests)
            policy = POLICIES[name](trace, capacity.blocks(trace))
            hits = 0
            try:
                for number, (chain, counted) in enumerate(trace.requests):
                    hits += min(policy.request(chain), counted)
                    if report is not None and number % REPORT_EVERY == 0:
                        report(done + number, total)
            finally:
                policy.close()
            results.append(
                Result(capacity.text, capacity.blocks(trace), name, hits / trace.references)
            )
    return results
