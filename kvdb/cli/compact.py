"""``kvdb compact``: give dead bytes back."""

from __future__ import annotations

import dataclasses

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import human_bytes, say, write_json


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@store_option
def compact(as_json: bool) -> None:
    """Rewrite shards that are mostly dead and join those that are small; no block is lost.

    Can be interrupted: what is done stays done.
    """
    with open_store() as store:
        report = store.compact()
    if as_json:
        write_json(dataclasses.asdict(report))
    else:
        say(
            f"{report.shards_read} shards became {report.shards_written}; "
            f"{human_bytes(report.freed_bytes)} of disk freed."
        )
