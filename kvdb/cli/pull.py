"""``kvdb pull``: what a remote has, into the store."""

from __future__ import annotations

import dataclasses

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import write_json
from kvdb.cli.transfer import conclude, remote_argument, say_pulled, transferring


@click.command()
@remote_argument
@click.option(
    "--model", metavar="NAME", help="Only state of this model (or namespace fingerprint)."
)
@click.option("--evict", is_flag=True, help="Make room for it: what was used least goes.")
@click.option("--dry-run", is_flag=True, help="Say what would come; store nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@store_option
def pull(remote: str, model: str | None, evict: bool, dry_run: bool, as_json: bool) -> None:
    """Store what the remote has and the store lacks.

    Every object is checked first; those that are not what their names say are counted, named in
    --json, and cost nothing else. What came stays when the rest fails, and a pull that was
    interrupted goes on when it is repeated. Exit code 1: it ended early, and says why; 3: nothing
    of what is there could be taken.
    """
    with (
        open_store(create=not dry_run, read_only=dry_run) as store,
        transferring("Objects pulled") as transfer,
    ):
        done = store.pull(
            remote,
            model=model,
            evict=evict,
            dry_run=dry_run,
            progress=transfer.progress,
            stopped=transfer.stopped,
        )
    if as_json:
        write_json(dataclasses.asdict(done))
    else:
        say_pulled(done, dry_run)
    conclude(done)
