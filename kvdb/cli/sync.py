"""``kvdb sync``: push, then pull."""

from __future__ import annotations

import dataclasses

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import write_json
from kvdb.cli.transfer import conclude, remote_argument, say_pulled, say_pushed, transferring


@click.command()
@remote_argument
@click.option("--evict", is_flag=True, help="Make room for what comes: what was used least goes.")
@click.option("--dry-run", is_flag=True, help="Say what would go and come; change nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@store_option
def sync(remote: str, evict: bool, dry_run: bool, as_json: bool) -> None:
    """Put what the remote lacks there, then store what the store lacks: kvdb push, then kvdb pull.

    A remote that is only read, or only written (kvdb remotes add), gets the other half alone. Exit
    codes are those of both.
    """
    with open_store() as store, transferring("Done") as transfer:
        done = store.sync(
            remote,
            evict=evict,
            dry_run=dry_run,
            progress=transfer.progress,
            stopped=transfer.stopped,
        )
    if as_json:
        write_json(dataclasses.asdict(done))
    else:
        if done.push is not None:
            say_pushed(done.push, dry_run)
        if done.pull is not None:
            say_pulled(done.pull, dry_run)
    conclude(done.push, done.pull)
