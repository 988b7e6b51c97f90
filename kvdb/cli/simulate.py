"""``kvdb simulate``: what would stay at another size, or under another policy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdb.cli.fleet import fleet_options, make_fleets, refuse, run_fleets
from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import say, table, write_json
from kvdb.cli.progress import progress
from kvdb.errors import UsageError

if TYPE_CHECKING:
    from kvdb.simulate.trace import Trace


@click.command()
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A block trace: JSON lines with hash_ids as in Mooncake's, plain or gzip. "
    "Without it, the store's own request history.",
)
@click.option(
    "--capacity",
    default="1%,5%,10%,25%,50%",
    show_default=True,
    metavar="SHARES",
    help="Sizes of the cache, as shares of the trace's different blocks.",
)
@click.option(
    "--policy",
    default="",
    metavar="NAMES",
    help="Only these of kvdb, lru, lru-2, arc, s3-fifo, sieve, lfu-da, belady.",
)
@click.option(
    "--nodes",
    metavar="COUNTS",
    help="Instead: replay the trace on so many machines (1,10,1000), each with a store of its own, "
    "that share a remote. The options below are for that.",
)
@fleet_options
@click.option("--json", "as_json", is_flag=True, help="A JSON array, one object a result.")
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Also draw the results into this .png, .svg or .pdf file.",
)
@store_option
def simulate(
    trace_path: Path | None,
    capacity: str,
    policy: str,
    nodes: str | None,
    as_json: bool,
    plot_path: Path | None,
    **fleet: Any,
) -> None:
    """Replay block references and show which share of them would hit.

    The policy kvdb is the store's own retention, run on an index in memory; belady knows the
    future and is the most that any policy can reach. A block hits only if all before it do.

    With --nodes: what is local, what comes from the remote and what is computed, and the time to
    the first token. All of it follows from the trace, the options and the seed; docs/scale.md says
    how.
    """
    if nodes is not None:
        _fleet(trace_path, nodes, {**fleet, "as_json": as_json}, plot_path)
        return
    refuse(fleet, "is for --nodes")
    from kvdb.simulate.plot import check_plot, draw
    from kvdb.simulate.replay import parse_capacities, parse_policies, replay

    capacities, policies = parse_capacities(capacity), parse_policies(policy)
    if plot_path is not None:
        check_plot(plot_path)
    trace, name = _trace(trace_path)
    say(
        f"{len(trace.requests):,} requests, {trace.references:,} block references, "
        f"{trace.blocks:,} different blocks."
    )
    with progress("Replaying", lambda requests: f"{requests:,} requests") as report:
        results = replay(trace, capacities, policies, report)
    if as_json:
        write_json([dataclasses.asdict(result) for result in results])
    else:
        rows = [
            [of, *(round(100 * result.hit_ratio, 1) for result in results if result.policy == of)]
            for of in policies
        ]
        click.echo(table(["hit %", *(capacity.text for capacity in capacities)], rows))
    if plot_path is not None:
        draw(results, plot_path, name)


def _fleet(
    trace_path: Path | None, nodes: str, given: dict[str, Any], plot_path: Path | None
) -> None:
    from kvdb.simulate.plot import check_plot

    refuse(("capacity", "policy"), "does not go with --nodes, which has --local-capacity and LRU")
    if trace_path is None:
        raise UsageError("--nodes needs --trace: a store's own history is that of one machine.")
    if given["machines_per_copy"] is not None:
        refuse(("copies",), "does not go with --machines-per-copy")
    fleets = make_fleets(nodes, given)
    if plot_path is not None:
        check_plot(plot_path)
    trace, name = _trace(trace_path)
    run_fleets(trace, name, fleets, given, plot_path)


def _trace(path: Path | None) -> tuple[Trace, str]:
    """The requests to replay, and what to call them."""
    from kvdb.simulate.history import read_history
    from kvdb.simulate.trace import read_trace

    if path is not None:
        return read_trace(path), path.name.removesuffix(".gz").removesuffix(".jsonl")
    with open_store(read_only=True) as store:
        trace, coverage = read_history(store.database)
    say(
        f"Of {coverage.requests:,} requests in the store's history, {coverage.whole:,} can be "
        f"replayed whole, {coverage.in_part:,} up to the blocks they found stored, and "
        f"{coverage.lost:,} not at all, their blocks being forgotten or never stored."
    )
    return trace, "request history of the store"
