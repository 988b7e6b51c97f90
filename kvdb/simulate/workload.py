"""The requests of a fleet: a trace, faster or slower, and several copies of it at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvdb.errors import UsageError
from kvdb.simulate.trace import Trace

SPREAD_SECONDS = 600.0


class Arrival(NamedTuple):
    """A prompt of ``tokens`` tokens, as block numbers, at a time in seconds."""

    at: float
    chain: Sequence[int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """``copies`` of the trace. Each but the first begins at a time of its own, up to
    SPREAD_SECONDS of the trace later, and its blocks are its own, but for those among the first
    ``shared_blocks`` of a prompt: these are the same in all copies, as a system prompt is that many
    tenants send. ``speedup`` shortens all times. Traces round times, Mooncake's to 3 s: requests
    of one timestamp are spread evenly over the time until the next."""

    trace: Trace
    copies: int = 1
    shared_blocks: int = 1
    speedup: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.trace.is_timed:
            raise UsageError(
                "Machines need a trace whose requests have a timestamp (ms) and an input_length."
            )

    @property
    def requests(self) -> int:
        return self.copies * len(self.trace.requests)

    @property
    def blocks(self) -> int:
        """Block numbers are below this."""
        return self.copies * self.trace.blocks

    def arrivals(self) -> Iterator[Arrival]:
        """All requests, in order of time."""
        trace = self.trace
        shifts = np.random.default_rng(self.seed).uniform(0, SPREAD_SECONDS, self.copies)
        shifts[0] = 0
        times = _spread(np.array([timing.at_seconds for timing in trace.timings]))
        all_times = (shifts[:, None] + times).ravel() / self.speedup
        for place in np.argsort(all_times, kind="stable").tolist():
            copy, number = divmod(place, len(trace.requests))
            chain: Sequence[int] = trace.requests[number].chain
            if copy:
                offset, shared = copy * trace.blocks, self.shared_blocks
                chain = (*chain[:shared], *(block + offset for block in chain[shared:]))
            yield Arrival(float(all_times[place]), chain, trace.timings[number].tokens)


def _spread(times: np.ndarray) -> np.ndarray:
    """Times in any order, apart where they were equal."""
    values, places, counts = np.unique(times, return_inverse=True, return_counts=True)
    gaps = np.append(np.diff(values), 0.0)
    order = np.argsort(times, kind="stable")
    ranks = np.empty(len(times), dtype=np.int64)
    ranks[order] = np.arange(len(times)) - np.repeat(np.cumsum(counts) - counts, counts)
    spread: np.ndarray = times + gaps[places] * ranks / counts[places]
    return spread
