"""``kvdb verify``: is the store what it should be?"""

from __future__ import annotations

import dataclasses

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import Format, human_bytes, output_options, say, write_rows
from kvdb.cli.progress import progress

PROBLEMS_FOUND = 3


@click.command()
@click.option("--data", is_flag=True, help="Read every stored byte and check it.")
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --data: check only N shards, taken at random.",
)
@click.option(
    "--repair", is_flag=True, help="Drop what is damaged, sweep what nobody names, and count again."
)
@click.option(
    "--from",
    "start",
    type=click.IntRange(min=0),
    default=0,
    metavar="SHARD",
    help="Go on where an interrupted run said it stopped.",
)
@output_options
@store_option
def verify(data: bool, sample: int | None, repair: bool, start: int, output: Format) -> None:
    """Check the index against the shards and print what is wrong, one row a problem.

    Without --repair nothing is changed. Ends with exit code 3 when problems remain.
    """
    if sample is not None and not data:
        raise click.UsageError("--sample only makes sense with --data.")
    from kvdb.check.verify import VerifyReport

    with (
        open_store(read_only=not repair) as store,
        progress("Shards checked") as report,
    ):
        found = VerifyReport()
        try:
            store.verify(
                data=data, repair=repair, sample=sample, start=start, report=found, progress=report
            )
        except KeyboardInterrupt:
            say(f"Stopped; --from {found.next_shard} goes on from here.")
            raise
    rows = [dataclasses.astuple(problem) for problem in found.problems]
    write_rows(("kind", "where", "detail", "repaired"), rows, output)
    left = sum(not problem.repaired for problem in found.problems)
    say(
        f"{found.checked_shards} shards, {human_bytes(found.checked_bytes)} checked: "
        f"{len(found.problems)} problems, {len(found.problems) - left} repaired."
    )
    if left:
        raise click.exceptions.Exit(PROBLEMS_FOUND)
