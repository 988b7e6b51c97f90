"""Many machines with a cache each, and one remote that they share, as a replay of a trace.

For each request, as in kvdb itself: what the machine has is read from its disk; the remote is asked
once for the rest, which costs a round trip; what it has is loaded if it arrives sooner than it
could be computed; the rest is computed, kept, and written to the remote behind the request. Time to
the first token is when all that is done. Machines compute as many prompts at once as they get, each
at full speed: ``prefill_load`` of the result says whether they could.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from kvdb.simulate.fleet_result import FleetResult, Tally
from kvdb.simulate.link import Link, end_through, through
from kvdb.simulate.machine import Machine
from kvdb.simulate.routing import ROUTINGS
from kvdb.simulate.shared import Limited, Shared, Unlimited
from kvdb.simulate.workload import Arrival, Workload

REPORT_EVERY = 512


@dataclass(frozen=True, slots=True)
class Fleet:
    """``nodes`` machines and their remote. Bandwidths are in bytes a second, capacities in bytes,
    ``inf`` for no limit. ``remote_bandwidth`` is what all of them share, each way; 0 means that
    there is no remote. ``write_queue`` is what a machine has waiting for the remote at most; more
    is not written."""

    nodes: int
    remote_bandwidth: float
    routing: str = "random"
    block_tokens: int = 512
    bytes_per_token: int = 131_072
    prefill_speed: float = 10_000.0
    round_trip: float = 0.002
    local_capacity: float = 1e12
    local_bandwidth: float = 5e9
    node_bandwidth: float = 3.125e9
    remote_capacity: float = inf
    write_queue: float = 16e9
    seed: int = 0

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.bytes_per_token

    def tokens_of(self, blocks: int, prompt_tokens: int) -> int:
        """How many tokens of a prompt its first blocks hold: the last one may be shorter."""
        return min(blocks * self.block_tokens, prompt_tokens)


class _Done(NamedTuple):
    """A prompt that is computed at ``at``: its blocks from ``start`` on are new."""

    at: float
    number: int
    node: int
    arrival: Arrival
    start: int


def simulate_fleet(
    fleet: Fleet, workload: Workload, report: Callable[[int, int], None] | None = None
) -> FleetResult:
    """Replay ``workload`` on ``fleet``. ``report`` gets (requests done, requests in all)."""
    run = _Run(fleet, workload)
    for number, arrival in enumerate(workload.arrivals()):
        run.write_until(arrival.at)
        run.serve(number, arrival)
        if report is not None and number % REPORT_EVERY == 0:
            report(number, workload.requests)
    run.write_until(inf)
    return run.tally.result(fleet, run.machines, run.incoming, run.outgoing, run.shared)


class _Run:
    def __init__(self, fleet: Fleet, workload: Workload) -> None:
        self.fleet = fleet
        most = workload.blocks * fleet.block_bytes
        capacity = int(min(fleet.local_capacity, most) // fleet.block_bytes)
        self.machines = [
            Machine(capacity, fleet.local_bandwidth, fleet.node_bandwidth)
            for _ in range(fleet.nodes)
        ]
        # Of the remote, seen from it: what it is given, and what it gives.
        self.incoming, self.outgoing = Link(fleet.remote_bandwidth), Link(fleet.remote_bandwidth)
        self.shared: Shared = (
            Unlimited(workload.blocks)
            if fleet.remote_capacity == inf
            else Limited(int(fleet.remote_capacity))
        )
        self.router = ROUTINGS[fleet.routing](fleet.nodes, workload.requests, fleet.seed)
        self.tally = Tally()
        self._computing: list[_Done] = []

    def serve(self, number: int, arrival: Arrival) -> None:
        fleet, (at, chain, tokens) = self.fleet, arrival
        node = self.router.choose(chain, tokens)
        machine = self.machines[node]
        found = machine.find(chain)
        local = fleet.tokens_of(found, tokens)
        ready = at  # when all is here that need not be computed
        if found:
            read = machine.disk.send(at, local * fleet.bytes_per_token)
            ready = max(read, machine.blocks[chain[found - 1]])
        remote, loaded = 0, found
        if found < len(chain) and fleet.remote_bandwidth:
            asked = at + fleet.round_trip
            loaded = self._shared_from(chain, found, asked)
            remote = fleet.tokens_of(loaded, tokens) - local
            ready = max(ready, asked)
            if loaded > found:
                links = (self.outgoing, machine.receiving)
                arrived = end_through(links, asked, remote * fleet.bytes_per_token)
                if max(ready, arrived) - ready < remote / fleet.prefill_speed:
                    through(links, asked, remote * fleet.bytes_per_token)
                    ready = max(ready, arrived)
                    for block in chain[found:loaded]:
                        self.shared.read(block)
                    self.tally.loads += 1
                    self.tally.objects_got += loaded - found
                else:
                    self.tally.recomputed += 1
                    remote, loaded = 0, found
            self.tally.lookups += 1
        computed = tokens - local - remote
        prefill = computed / fleet.prefill_speed
        machine.prefill_seconds += prefill
        done = ready + prefill
        machine.use(chain, done)
        self.tally.add(at, done, local, remote, computed)
        if fleet.remote_bandwidth and loaded < len(chain):
            heapq.heappush(self._computing, _Done(done, number, node, arrival, loaded))

    def write_until(self, at: float) -> None:
        """Write to the remote what was computed by then."""
        while self._computing and self._computing[0].at <= at:
            self._write(heapq.heappop(self._computing))

    def _shared_from(self, chain: Sequence[int], start: int, at: float) -> int:
        """How many blocks of a chain could be had, with those that the remote has."""
        end = start
        while end < len(chain) and self.shared.has(chain[end], at):
            end += 1
        return end

    def _write(self, done: _Done) -> None:
        fleet, machine = self.fleet, self.machines[done.node]
        chain, tokens = done.arrival.chain, done.arrival.tokens
        room = fleet.write_queue - machine.unsent_bytes(done.at)
        sizes: dict[int, int] = {}
        nbytes = 0
        for number in range(done.start, len(chain)):
            if self.shared.has(chain[number], done.at):
                continue
            held = fleet.tokens_of(number + 1, tokens) - fleet.tokens_of(number, tokens)
            size = held * fleet.bytes_per_token
            if nbytes + size > room:
                self.tally.dropped += len(chain) - number
                break
            sizes[chain[number]] = size
            nbytes += size
        if not sizes:
            return
        sent_at = through((self.incoming, machine.sending), done.at, nbytes)
        machine.queue(sent_at, nbytes)
        self.tally.objects_put += len(sizes)
        for block, size in sizes.items():
            self.shared.put(block, size, sent_at)
