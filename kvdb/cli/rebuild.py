"""``kvdb rebuild``: make the index anew from the shards."""

from __future__ import annotations

import dataclasses

import click

from kvdb.cli.options import settings, store_option
from kvdb.cli.output import human_bytes, say, write_json
from kvdb.cli.progress import progress

PROBLEMS_FOUND = 3


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@store_option
def rebuild(as_json: bool) -> None:
    """Make the index anew from the shards, for a store whose index is damaged or gone.

    The old index, if any, is set aside, not deleted. Needs the store for itself. Prints what could
    not be brought back, one line each, and then ends with exit code 3.
    """
    import kvdb

    path = settings()["store"]
    with progress("Shards read") as report:
        done = kvdb.rebuild(path, progress=report)
    if as_json:
        document = dataclasses.asdict(done)
        document["set_aside"] = None if done.set_aside is None else str(done.set_aside)
        write_json(document)
    else:
        for line in (*done.skipped, *done.lost):
            click.echo(line)
        say(
            f"{done.blocks} blocks of {done.namespaces} namespaces are back "
            f"({human_bytes(done.nbytes)}); {len(done.skipped)} files were skipped."
        )
        if done.set_aside is not None:
            say(f"The old index is now {done.set_aside}.")
    if done.lost or done.skipped:
        raise click.exceptions.Exit(PROBLEMS_FOUND)
