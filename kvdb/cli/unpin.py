"""``kvdb unpin``: let a pinned block go."""

from __future__ import annotations

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import say


@click.command()
@click.argument("name")
@store_option
def unpin(name: str) -> None:
    """End the pin or named sequence NAME. Its blocks stay until they are evicted."""
    with open_store() as store:
        store.find_sequence(name).drop()
    say(f"{name} holds nothing any more.")
