"""The options of ``kvdb simulate --nodes``, and what it prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvdb.cli.evict import Size
from kvdb.cli.options import Function, Number
from kvdb.cli.output import human_bytes, table, write_json
from kvdb.cli.progress import progress
from kvdb.errors import UsageError

if TYPE_CHECKING:
    from kvdb.simulate.fleet import Fleet
    from kvdb.simulate.fleet_result import FleetResult
    from kvdb.simulate.trace import Trace
    from kvdb.simulate.workload import Workload

ROUTING = click.Choice(("random", "sticky", "prefix"))
MOST_COPIES = 1000
POSITIVE = Number(min=1e-6, max=1e12)
HEADERS = (
    "machines", "remote", "local %", "remote %", "computed %", "mean s", "p50 s", "p95 s", "p99 s",
    "link out %", "link in %", "lookups/s", "remote blocks", "remote size", "prefill load",
)  # fmt: skip

OPTIONS = (
    click.option(
        "--remote-bandwidth",
        default="0,1GB/s,10GB/s",
        show_default=True,
        metavar="RATES",
        help="What all machines share, each way: 100MB/s, 10Gbit/s, unlimited; 0 is no remote.",
    ),
    click.option(
        "--remote-capacity", type=Size(), metavar="SIZE", help="Room of the remote [no limit]."
    ),
    click.option(
        "--round-trip",
        default=2.0,
        show_default=True,
        type=Number(0, 1e6),
        metavar="MS",
        help="Of a question to the remote.",
    ),
    click.option(
        "--routing",
        default="sticky",
        show_default=True,
        type=ROUTING,
        help="Which machine gets a request: any, that of its conversation, or the one that last "
        "had its beginning.",
    ),
    click.option(
        "--local-capacity",
        default="1TB",
        show_default=True,
        type=Size(),
        metavar="SIZE",
        help="Room of one machine's store, kept by LRU.",
    ),
    click.option(
        "--local-bandwidth",
        default="5GB/s",
        show_default=True,
        metavar="RATE",
        help="Of one machine's disk.",
    ),
    click.option(
        "--node-bandwidth",
        default="25Gbit/s",
        show_default=True,
        metavar="RATE",
        help="Of one machine's network, each way.",
    ),
    click.option(
        "--write-queue",
        default="16GB",
        show_default=True,
        type=Size(),
        metavar="SIZE",
        help="What one machine has waiting for the remote at most; more is not written.",
    ),
    click.option(
        "--prefill-speed",
        default=10_000.0,
        show_default=True,
        type=POSITIVE,
        metavar="N",
        help="Tokens a second that one machine computes.",
    ),
    click.option(
        "--bytes-per-token",
        default="128KiB",
        show_default=True,
        type=Size(),
        metavar="SIZE",
        help="State of one token: 128KiB is a model of 8 B (32 layers, 8 heads of 128, 16 bit).",
    ),
    click.option(
        "--block-tokens",
        default=512,
        show_default=True,
        type=click.IntRange(1, 1 << 20),
        metavar="N",
        help="Tokens of one of the trace's blocks; Mooncake's have 512.",
    ),
    click.option(
        "--copies",
        default=1,
        show_default=True,
        type=click.IntRange(1, MOST_COPIES),
        metavar="K",
        help="Replay K copies of the trace at once, shifted by up to 10 minutes, with blocks of "
        "their own.",
    ),
    click.option(
        "--machines-per-copy",
        type=POSITIVE,
        metavar="M",
        help="Instead: as many copies, and as fast, that each M machines have the trace's load.",
    ),
    click.option(
        "--shared-blocks",
        default=1,
        show_default=True,
        type=click.IntRange(0, 1 << 20),
        metavar="N",
        help="The first blocks of a prompt that are the same in all copies.",
    ),
    click.option(
        "--speedup",
        default=1.0,
        show_default=True,
        type=POSITIVE,
        metavar="X",
        help="Let requests come X times as fast.",
    ),
    click.option(
        "--seed",
        default=0,
        show_default=True,
        type=click.IntRange(0, 1 << 32),
        metavar="N",
        help="Of what is drawn: machines, and when copies begin.",
    ),
)


def fleet_options(function: Function) -> Function:
    """All of :data:`OPTIONS`."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def refuse(names: Iterable[str], why: str) -> None:
    """Raise UsageError if one of these options was given."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name.replace('_', '-')} {why}.")


def make_fleets(nodes: str, given: dict[str, Any]) -> list[Fleet]:
    """Fleets of each size with each bandwidth. Raises UsageError."""
    from kvdb.simulate.fleet import Fleet
    from kvdb.simulate.rates import parse_nodes, parse_rate

    disk, card = (parse_rate(given[name]) for name in ("local_bandwidth", "node_bandwidth"))
    if not disk or not card or not given["bytes_per_token"]:
        raise UsageError("A machine's bandwidths and its bytes per token must be above 0.")
    rates = dict.fromkeys(parse_rate(text) for text in given["remote_bandwidth"].split(","))
    return [
        Fleet(
            count,
            rate,
            routing=given["routing"],
            block_tokens=given["block_tokens"],
            bytes_per_token=given["bytes_per_token"],
            prefill_speed=given["prefill_speed"],
            round_trip=given["round_trip"] / 1000,
            local_capacity=given["local_capacity"],
            local_bandwidth=disk,
            node_bandwidth=card,
            remote_capacity=inf if given["remote_capacity"] is None else given["remote_capacity"],
            write_queue=given["write_queue"],
            seed=given["seed"],
        )
        for count in parse_nodes(nodes)
        for rate in rates
    ]


def run_fleets(
    trace: Trace, name: str, fleets: Sequence[Fleet], given: dict[str, Any], plot: Path | None
) -> None:
    """Simulate, print, draw."""
    from kvdb.simulate.fleet import simulate_fleet
    from kvdb.simulate.fleet_plot import draw_fleets

    workloads = [_workload(trace, fleet.nodes, given) for fleet in fleets]
    total, done = sum(workload.requests for workload in workloads), 0
    results: list[FleetResult] = []
    with progress("Replaying", lambda requests: f"{requests:,} requests") as report:
        for fleet, workload in zip(fleets, workloads, strict=True):

            def advance(requests: int, _: int, before: int = done) -> None:
                report(before + requests, total)

            results.append(simulate_fleet(fleet, workload, advance))
            done += workload.requests
    if given["as_json"]:
        write_json(
            [{**dataclasses.asdict(one), "saved_tokens": one.saved_tokens} for one in results]
        )
    else:
        click.echo(table(HEADERS, [_row(one) for one in results]))
    if plot is not None:
        draw_fleets(results, plot, f"{name}, routing {given['routing']}")


def _workload(trace: Trace, nodes: int, given: dict[str, Any]) -> Workload:
    from kvdb.simulate.workload import Workload

    copies, speedup = given["copies"], given["speedup"]
    if given["machines_per_copy"] is not None:
        wanted = nodes / given["machines_per_copy"]
        copies = max(1, round(wanted))
        speedup *= wanted / copies
    if copies > MOST_COPIES:
        raise UsageError(f"That would be {copies:,} copies of the trace; at most {MOST_COPIES:,}.")
    return Workload(trace, copies, given["shared_blocks"], speedup, given["seed"])


def _row(one: FleetResult) -> list[Any]:
    from kvdb.simulate.rates import rate_text

    hits = (
        one.local_hit_ratio,
        one.remote_hit_ratio,
        1 - one.local_hit_ratio - one.remote_hit_ratio,
    )
    waits = (one.mean_seconds, one.p50_seconds, one.p95_seconds, one.p99_seconds)
    return [
        one.nodes,
        rate_text(one.remote_bandwidth),
        *(round(100 * share, 1) for share in hits),
        *(round(seconds, 2) for seconds in waits),
        round(100 * one.link_out),
        round(100 * one.link_in),
        round(one.lookups_per_second, 1),
        one.remote_blocks,
        human_bytes(one.remote_bytes),
        round(one.prefill_load, 2),
    ]
