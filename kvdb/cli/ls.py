"""``kvdb ls``: what is in the store."""

from __future__ import annotations

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import Format, output_options, say, write_rows

SKIPS = ("full", "refill", "partial", "approximate", "none")


@click.command()
@click.argument("kind", metavar="KIND")
@click.option("--namespace", type=int, metavar="ID", help="Only of this namespace.")
@click.option(
    "--state",
    type=click.Choice(("live", "evicted", "writing", "dead")),
    help="Only blocks or shards in this state.",
)
@click.option("--hash", "hash_prefix", metavar="HEX", help="Only blocks whose hash starts so.")
@click.option("--skip", type=click.Choice(SKIPS), help="Only requests of this kind of skip.")
@click.option(
    "--limit",
    default=100,
    show_default=True,
    type=click.IntRange(min=0),
    help="Print at most this many rows.",
)
@output_options
@store_option
def ls(
    kind: str,
    namespace: int | None,
    state: str | None,
    hash_prefix: str | None,
    skip: str | None,
    limit: int,
    output: Format,
) -> None:
    """List what the store holds, newest first.

    KIND is blocks, shards, namespaces, sequences or requests.
    """
    from kvdb.listing import LISTINGS

    if kind not in LISTINGS:
        raise click.UsageError(f"{kind!r} is none of {', '.join(LISTINGS)}.")
    listing = LISTINGS[kind]
    given = {"namespace": namespace, "state": state, "hash": hash_prefix, "skip": skip}
    for name, value in given.items():
        if value is not None and name not in listing.filters:
            raise click.UsageError(f"--{name} does not apply to {kind}.")
    with open_store(read_only=True) as store:
        result = store.sql(
            listing.sql, {name: given[name] for name in listing.filters}, limit=limit
        )
    write_rows(result.columns, result.rows, output)
    if result.capped:
        say(f"Only the first {limit} rows are shown; --limit shows more.")
