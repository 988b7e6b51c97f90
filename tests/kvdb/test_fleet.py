"""Many machines and a remote: examples worked out by hand, what must hold of any trace, and the
program around them."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdb.cli import cli
from kvdb.errors import UsageError
from kvdb.simulate.fleet import Fleet, simulate_fleet
from kvdb.simulate.fleet_result import FleetResult
from kvdb.simulate.link import Link
from kvdb.simulate.machine import Machine
from kvdb.simulate.rates import parse_nodes, parse_rate, rate_text
from kvdb.simulate.replay import POLICIES
from kvdb.simulate.routing import ROUTINGS
from kvdb.simulate.trace import Timing, Trace, read_trace
from kvdb.simulate.workload import Workload

MOONCAKE = Path(__file__).parent.parent / "data/mooncake_conversation.jsonl.gz"
# A block is 10 tokens of 1 byte; a machine computes 1 token a second.
SMALL = Fleet(
    2,
    inf,
    block_tokens=10,
    bytes_per_token=1,
    prefill_speed=1.0,
    round_trip=0.0,
    local_capacity=inf,
    local_bandwidth=inf,
    node_bandwidth=inf,
    write_queue=inf,
)


def timed(*requests: tuple[float, list[int], int]) -> Trace:
    trace = Trace()
    for at, keys, tokens in requests:
        trace.add(keys, timing=Timing(at, tokens))
    return trace


def run(fleet: Fleet, trace: Trace, **options: float) -> FleetResult:
    return simulate_fleet(fleet, Workload(trace, **options))  # type: ignore[arg-type]


def waits(fleet: Fleet, trace: Trace) -> list[float]:
    """Times to the first token, request by request."""
    from kvdb.simulate.fleet import _Run

    run = _Run(fleet, Workload(trace))
    for number, arrival in enumerate(Workload(trace).arrivals()):
        run.write_until(arrival.at)
        run.serve(number, arrival)
    return list(run.tally.waits)


# -- by hand -------------------------------------------------------------------------------------


class Alternating:
    def __init__(self, nodes: int, requests: int, seed: int) -> None:
        self.nodes, self.number = nodes, -1

    def choose(self, chain: object, tokens: int) -> int:
        self.number += 1
        return self.number % self.nodes


@pytest.fixture
def alternating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTINGS, "random", Alternating)  # type: ignore[misc]


@pytest.mark.usefixtures("alternating")
def test_load_and_recompute_by_hand() -> None:
    """Machine 0 computes 20 tokens in 20 s and writes 20 bytes at 4 B/s: readable from 25 s on."""
    trace = timed(
        (0, [1, 2], 20),
        (24, [1, 2, 3], 25),  # machine 1, a second too early: computes all 25
        (100, [1, 2, 4], 30),  # machine 0 has 20 tokens, computes 10
        (200, [5], 10),
        (300, [9], 10),  # machine 0
        (400, [9, 6], 15),  # machine 1: 10 bytes take 2.5 s and 0.5 s, then 5 tokens
    )
    fleet = replace(SMALL, remote_bandwidth=4.0, round_trip=0.5)
    assert waits(fleet, trace) == [20.5, 25.5, 10.5, 10.5, 10.5, 8.0]
    result = run(fleet, trace)
    assert (result.local_tokens, result.remote_tokens, result.computed_tokens) == (20, 10, 80)
    assert (result.loads, result.recomputed, result.remote_read_bytes) == (1, 0, 10)
    # Machine 1 is done at 49.5, when blocks 1 and 2 are there: it sends only the third.
    assert result.remote_written_bytes == 20 + 5 + 10 + 10 + 10 + 5
    assert (result.remote_blocks, result.remote_bytes) == (7, 60)
    # At 0.9 B/s 10 bytes take longer than to compute them.
    slow = run(replace(fleet, remote_bandwidth=0.9), trace)
    assert (slow.loads, slow.recomputed, slow.remote_tokens) == (0, 1, 0)
    # No remote, no question.
    assert waits(replace(fleet, remote_bandwidth=0), trace) == [20, 25, 10, 10, 10, 15]


def test_a_link_is_a_queue() -> None:
    link = Link(10.0)
    assert (link.send(0, 20), link.send(1, 10), link.end_of(1, 5), link.send(9, 10)) == (
        2.0,
        3.0,
        3.5,
        10.0,
    )
    assert (link.busy_seconds, link.nbytes) == (4.0, 40)


@pytest.mark.usefixtures("alternating")
def test_two_loads_share_the_remote() -> None:
    """Three machines ask for the same 40 bytes at once, at 8 B/s: 5, 10 and 15 s."""
    trace = timed((0, [1, 2, 3, 4], 40), *((100 + n * 1e-6, [1, 2, 3, 4], 40) for n in (1, 2, 3)))
    fleet = replace(SMALL, nodes=4, remote_bandwidth=8.0)
    assert waits(fleet, trace) == pytest.approx([40, 5, 10, 15], abs=1e-4)
    # Twice as many: from the eighth on it is sooner computed, and nobody waits longer than that.
    fleet = replace(fleet, nodes=12)
    many = timed((0, [1, 2, 3, 4], 40), *((100 + n * 1e-6, [1, 2, 3, 4], 40) for n in range(11)))
    assert waits(fleet, many) == pytest.approx([40, *range(5, 40, 5), *[40] * 4], abs=1e-4)


@pytest.mark.usefixtures("alternating")
def test_a_full_queue_drops_and_a_full_remote_forgets() -> None:
    trace = timed((0, [1, 2, 3], 30), (100, [1, 2, 3], 30), (200, [1, 2, 3], 30))
    dropping = run(replace(SMALL, nodes=3, write_queue=20), trace)
    assert (dropping.dropped_blocks, dropping.remote_blocks) == (1, 3)
    assert dropping.remote_tokens == 20 + 30  # machine 1 wrote the last block, which it computed
    # Room for two blocks: the first goes when the third comes, and without it nothing begins; when
    # it comes again the second goes.
    full = run(replace(SMALL, nodes=3, remote_capacity=20), trace)
    assert (full.remote_blocks, full.remote_bytes, full.remote_tokens) == (2, 20, 10)


def test_equal_beginnings_at_once_are_computed_once() -> None:
    trace = timed((0, [1, 2], 20), (0.0, [1, 2, 3], 25), (50, [1], 10))
    single = replace(SMALL, nodes=1, remote_bandwidth=0)
    # Two of one timestamp are spread until the next: 0 and 25.
    assert waits(single, trace) == [20, 5, 0]
    trace = timed((0, [1, 2], 20), (1, [1, 2, 3], 25))
    assert waits(single, trace) == [20, 19 + 5]


# -- what must hold ------------------------------------------------------------------------------

SETTINGS = settings(max_examples=40, deadline=None)


@st.composite
def traces(draw: st.DrawFn, gap: float = 1.0) -> Trace:
    """Prompts over a small tree, so that many share beginnings; ``gap`` seconds apart at most."""
    trace, at = Trace(), 0.0
    for _ in range(draw(st.integers(1, 25))):
        keys = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        tail = draw(st.integers(1, 10))
        at += draw(st.floats(0, 1)) * gap
        trace.add(keys, timing=Timing(at, 10 * (len(keys) - 1) + tail))
    return trace


def fleets(**fixed: object) -> st.SearchStrategy[Fleet]:
    drawn = {
        "nodes": st.integers(1, 5),
        "remote_bandwidth": st.sampled_from([0.0, 0.5, 3.0, 50.0, inf]),
        "routing": st.sampled_from(sorted(ROUTINGS)),
        "round_trip": st.sampled_from([0.0, 0.3, 7.0]),
        "local_capacity": st.sampled_from([0.0, 10.0, 40.0, inf]),
        "local_bandwidth": st.sampled_from([2.0, inf]),
        "node_bandwidth": st.sampled_from([1.5, inf]),
        "remote_capacity": st.sampled_from([0.0, 30.0, inf]),
        "write_queue": st.sampled_from([0.0, 35.0, inf]),
        "seed": st.integers(0, 3),
    }
    drawn |= {name: st.just(value) for name, value in fixed.items()}
    return st.builds(lambda **given: replace(SMALL, **given), **drawn)


@SETTINGS
@given(traces(), fleets())
def test_tokens_are_conserved_and_runs_repeat(trace: Trace, fleet: Fleet) -> None:
    result = run(fleet, trace)
    assert result.prompt_tokens == sum(timing.tokens for timing in trace.timings)
    assert result.local_tokens + result.remote_tokens + result.computed_tokens == (
        result.prompt_tokens
    )
    assert result.remote_read_bytes == result.remote_tokens * fleet.bytes_per_token
    assert result.remote_bytes <= min(result.remote_written_bytes, fleet.remote_capacity)
    assert 0 <= result.link_in <= 1 + 1e-9
    assert 0 <= result.link_out <= 1 + 1e-9
    assert run(fleet, trace) == result


@SETTINGS
@given(traces(), fleets())
def test_a_remote_costs_no_request_more_than_its_round_trip(trace: Trace, fleet: Fleet) -> None:
    alone = waits(replace(fleet, remote_bandwidth=0.0), trace)
    shared = waits(fleet, trace)
    for with_remote, without in zip(shared, alone, strict=True):
        assert with_remote <= without + fleet.round_trip + 1e-6


@SETTINGS
@given(
    traces(gap=1e6),
    fleets(remote_bandwidth=inf, node_bandwidth=inf, remote_capacity=inf, write_queue=inf),
)
def test_a_perfect_remote_is_one_machine_with_room_for_all(trace: Trace, fleet: Fleet) -> None:
    fleet = replace(fleet, round_trip=0.0)
    one = replace(SMALL, nodes=1, remote_bandwidth=0.0)
    # Requests that come while another is computed may compute the same.
    trace = timed(
        *(
            (1e4 * number, list(chain), timing.tokens)
            for number, ((chain, _), timing) in enumerate(
                zip(trace.requests, trace.timings, strict=True)
            )
        )
    )
    assert run(fleet, trace).saved_tokens == run(one, trace).local_tokens


@SETTINGS
@given(traces(), fleets(remote_bandwidth=1e-6))
def test_a_useless_remote_leaves_machines_as_they_are(trace: Trace, fleet: Fleet) -> None:
    alone = run(replace(fleet, remote_bandwidth=0.0), trace)
    useless = run(fleet, trace)
    assert useless.remote_tokens == 0
    assert useless.local_tokens == alone.local_tokens


@SETTINGS
@given(traces(), st.integers(1, 12))
def test_a_machine_is_the_lru_of_the_replay(trace: Trace, capacity: int) -> None:
    machine, lru = Machine(capacity, inf, inf), POLICIES["lru"](trace, capacity)
    for chain, _ in trace.requests:
        assert machine.find(chain) == lru.request(chain)
        machine.use(chain, 0.0)
        held = machine.blocks
        assert {trace.parents[block] for block in held} <= set(held) | {-1}


# -- the real trace ------------------------------------------------------------------------------


def test_mooncake_on_ten_machines() -> None:
    trace = read_trace(MOONCAKE)
    random, sticky, shared = (
        run(Fleet(10, rate, routing=routing), trace)
        for routing, rate in (("random", 0.0), ("sticky", 0.0), ("random", 1e10))
    )
    # 37.4 % of tokens would hit in a cache without limit (the trace's README).
    assert random.local_hit_ratio < 0.15 < 0.3 < sticky.local_hit_ratio < 0.374
    assert 0.36 < shared.local_hit_ratio + shared.remote_hit_ratio < 0.374
    assert shared.mean_seconds < random.mean_seconds


def test_copies_share_the_first_blocks_only() -> None:
    trace = timed((0, [1, 2, 3], 30), (5, [1, 4], 20))
    arrivals = list(Workload(trace, copies=3, shared_blocks=1, speedup=2).arrivals())
    assert [arrival.at for arrival in arrivals] == sorted(arrival.at for arrival in arrivals)
    assert len(arrivals) == 6
    assert {arrival.chain[0] for arrival in arrivals} == {0}
    assert len({block for arrival in arrivals for block in arrival.chain}) == 1 + 3 * 3
    gaps = [
        b.at - a.at for a in arrivals for b in arrivals if a.chain[1] % 4 == 1 == b.chain[1] % 4 - 2
    ]
    assert 2.5 in [round(gap, 6) for gap in gaps]
    assert len({a.chain for a in Workload(trace, copies=2, shared_blocks=0).arrivals()}) == 4


# -- the program ---------------------------------------------------------------------------------


def program(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["simulate", *map(str, arguments)])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "small.jsonl"
    lines = [
        {"timestamp": 1000 * at, "input_length": 512 * len(keys), "hash_ids": keys}
        for at, keys in enumerate([[1, 2], [1, 3], [1, 2], [1, 2, 4]] * 5)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_the_table_and_the_picture(small: Path, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    rates = ("--nodes", "1,3", "--remote-bandwidth", "0,10Gbit/s,unlimited")
    result = program("--trace", small, *rates, "--plot", picture)
    assert result.exit_code == 0, result.output
    rows = result.stdout.splitlines()
    assert rows[0].split()[:4] == ["machines", "remote", "local", "%"]
    assert [row.split()[0] for row in rows[2:]] == ["1"] * 3 + ["3"] * 3
    assert "1.25 GB/s" in rows[3]
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = program("--trace", small, *rates, "--json", "--machines-per-copy", "1.5")
    documents = json.loads(result.stdout)
    assert [document["requests"] for document in documents] == [20] * 3 + [40] * 3
    assert [document["remote_bandwidth"] for document in documents[:3]] == [0, 1.25e9, None]
    for document in documents:
        assert document["saved_tokens"] + document["computed_tokens"] == document["prompt_tokens"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "0"], "is no number of machines"),
        (["--nodes", "1,x"], "is no number of machines"),
        (["--nodes", "2", "--remote-bandwidth", "fast"], "is no bandwidth"),
        (["--nodes", "2", "--remote-bandwidth", "-1GB/s"], "is no bandwidth"),
        (["--nodes", "2", "--local-bandwidth", "0"], "must be above 0"),
        (["--nodes", "2", "--bytes-per-token", "0"], "must be above 0"),
        (["--nodes", "2", "--capacity", "5%"], "does not go with --nodes"),
        (["--nodes", "2", "--copies", "3", "--machines-per-copy", "1"], "does not go with"),
        (["--nodes", "100000", "--machines-per-copy", "1"], "at most 1,000"),
        (["--nodes", "2", "--prefill-speed", "nan"], "is not a number"),
        (["--round-trip", "3"], "is for --nodes"),
    ],
)
def test_wrong_use_is_one_sentence(small: Path, options: list[str], said: str) -> None:
    result = program("--trace", small, *options)
    assert result.exit_code == 2, result.output
    assert said in result.stderr.strip().splitlines()[-1]
    assert result.stdout == ""


def test_a_trace_that_tells_no_times(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    for line, said in (
        ({"hash_ids": [1]}, "need a trace whose requests have a timestamp"),
        ({"hash_ids": [1], "timestamp": -1, "input_length": 3}, "line 1: timestamp is no time"),
        ({"hash_ids": [1], "timestamp": 1, "input_length": 3.5}, "line 1: input_length is no"),
        ({"hash_ids": [1], "timestamp": True, "input_length": 3}, "line 1: timestamp is no time"),
    ):
        file.write_text(json.dumps(line))
        result = program("--trace", file, "--nodes", "2")
        assert result.exit_code == 2
        assert said in result.stderr.strip().splitlines()[-1]
    assert "--nodes needs --trace" in program("--nodes", "2").stderr


def test_rates_and_counts() -> None:
    assert [parse_rate(text) for text in ("100MB/s", "10Gbit/s", "0", " 1.5 KB/s", "8bit/s")] == [
        1e8, 1.25e9, 0.0, 1500.0, 1.0
    ]  # fmt: skip
    assert parse_rate("unlimited") == inf
    for text in ("", "5", "1GB", "GB/s", "1e9B/s", "١GB/s", "nan"):
        with pytest.raises(UsageError):
            parse_rate(text)
    assert [rate_text(rate) for rate in (None, 0, 1.25e9, 500.0, 0.5)] == [
        "unlimited", "none", "1.25 GB/s", "500 B/s", "0.5 B/s"
    ]  # fmt: skip
    assert parse_nodes("1, 10,10") == [1, 10]
