"""What came of a replay on many machines."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvdb.simulate.link import Link
from kvdb.simulate.machine import Machine
from kvdb.simulate.shared import Shared

if TYPE_CHECKING:
    from kvdb.simulate.fleet import Fleet

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Tokens add up: local + remote + computed = prompt. Seconds are times to the first token.

    ``remote_bandwidth`` is in bytes a second, None for no limit. ``lookups_per_second`` are
    existence queries; ``objects_per_second`` are objects got and put. ``link_out`` and ``link_in``
    are the share of the time in which the remote's line was sending and receiving. ``loads`` and
    ``recomputed`` count requests of which the remote had more than the machine; ``dropped_blocks``
    were not written to the remote, whose queue was full. ``local_blocks`` is the fullest machine's.
    ``prefill_load`` is how many prompts a machine computed at once on average; above 1 it could
    not have.
    """

    nodes: int
    remote_bandwidth: float | None
    routing: str
    requests: int
    prompt_tokens: int
    local_tokens: int
    remote_tokens: int
    computed_tokens: int
    local_hit_ratio: float
    remote_hit_ratio: float
    mean_seconds: float
    p50_seconds: float
    p95_seconds: float
    p99_seconds: float
    remote_read_bytes: int
    remote_written_bytes: int
    link_out: float
    link_in: float
    lookups_per_second: float
    objects_per_second: float
    loads: int
    recomputed: int
    dropped_blocks: int
    remote_blocks: int
    remote_bytes: int
    local_blocks: int
    prefill_load: float

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.local_tokens + self.remote_tokens


class Tally:
    """Counts as a replay goes."""

    def __init__(self) -> None:
        self.local = self.remote = self.computed = 0
        self.loads = self.recomputed = self.lookups = self.dropped = 0
        self.objects_got = self.objects_put = 0
        self.waits = array("d")
        self._first, self._last = inf, 0.0

    def add(self, at: float, done: float, local: int, remote: int, computed: int) -> None:
        """A request that came at a time and had its first token at another."""
        self.local += local
        self.remote += remote
        self.computed += computed
        self.waits.append(done - at)
        self._first, self._last = min(self._first, at), max(self._last, done)

    def result(
        self,
        fleet: Fleet,
        machines: Sequence[Machine],
        incoming: Link,
        outgoing: Link,
        shared: Shared,
    ) -> FleetResult:
        prompt = self.local + self.remote + self.computed
        span = self._last - self._first

        def use(link: Link) -> float:
            """What it sends after the last request, without a pause, does not count."""
            busy = link.busy_seconds - max(0.0, link.free_at - self._last)
            return share(max(0.0, busy), span)

        def share(amount: float, of: float) -> float:
            return amount / of if of > 0 else 0.0

        waits = np.frombuffer(self.waits)
        p50, p95, p99 = (float(value) for value in np.percentile(waits, PERCENTILES))
        return FleetResult(
            nodes=fleet.nodes,
            remote_bandwidth=None if fleet.remote_bandwidth == inf else fleet.remote_bandwidth,
            routing=fleet.routing,
            requests=len(waits),
            prompt_tokens=prompt,
            local_tokens=self.local,
            remote_tokens=self.remote,
            computed_tokens=self.computed,
            local_hit_ratio=share(self.local, prompt),
            remote_hit_ratio=share(self.remote, prompt),
            mean_seconds=float(waits.mean()),
            p50_seconds=p50,
            p95_seconds=p95,
            p99_seconds=p99,
            remote_read_bytes=outgoing.nbytes,
            remote_written_bytes=incoming.nbytes,
            link_out=use(outgoing),
            link_in=use(incoming),
            lookups_per_second=share(self.lookups, span),
            objects_per_second=share(self.objects_got + self.objects_put, span),
            loads=self.loads,
            recomputed=self.recomputed,
            dropped_blocks=self.dropped,
            remote_blocks=shared.rows,
            remote_bytes=shared.nbytes,
            local_blocks=max(len(machine.blocks) for machine in machines),
            prefill_load=share(
                sum(machine.prefill_seconds for machine in machines), span * fleet.nodes
            ),
        )
