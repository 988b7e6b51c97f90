"""``kvdb migrate``: bring a store's schema up to date."""

from __future__ import annotations

import click

from kvdb.cli.options import settings, store_option
from kvdb.cli.output import say


@click.command()
@store_option
def migrate() -> None:
    """Bring the store's schema up to date.

    Opening a store for writing does the same. Prints the names of the migrations that were
    applied, one a line. Programs that use the store must be stopped first.
    """
    import kvdb

    path = settings()["store"]
    applied = kvdb.migrate(path)
    for name in applied:
        click.echo(name)
    say(f"The store at {path} is up to date.")
