"""``kvdb push``: what is stored here, to a remote."""

from __future__ import annotations

import dataclasses

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import write_json
from kvdb.cli.selecting import selection_options
from kvdb.cli.transfer import conclude, remote_argument, say_pushed, transferring


@click.command()
@remote_argument
@selection_options
@click.option(
    "--verify",
    is_flag=True,
    help="Fetch what is there of it, check it, and replace what is bad.",
)
@click.option("--dry-run", is_flag=True, help="Say what would go; put nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@store_option
def push(
    remote: str,
    sequences: tuple[str, ...],
    where: str | None,
    model: str | None,
    max_bytes: int | None,
    verify: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Put what is stored here and the remote lacks there, for kvdb pull on any machine.

    NAME is one of kvdb remotes list. Only what is missing goes, so a push that was interrupted goes
    on when it is repeated. Exit code 1: it ended early, and says why; what went there stays.
    """
    with open_store() as store, transferring("Blocks pushed") as transfer:
        done = store.push(
            remote,
            sequences=sequences,
            where=where,
            model=model,
            max_bytes=max_bytes,
            verify=verify,
            dry_run=dry_run,
            progress=transfer.progress,
            stopped=transfer.stopped,
        )
    if as_json:
        write_json(dataclasses.asdict(done))
    else:
        say_pushed(done, dry_run)
    conclude(done)
