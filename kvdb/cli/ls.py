"""``kvdb ls``: what is in the store."""

from __future__ import annotations

import time
from typing import Any

import click

from kvdb.cli.options import RowId, open_store, store_option
from kvdb.cli.output import Format, output_options, say, write_rows

SKIPS = ("full", "refill", "partial", "approximate", "none")


class Moment(click.ParamType[int]):
    """A time, as Unix microseconds."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        from kvdb.listing import moment

        if isinstance(value, int):
            return value
        try:
            return moment(str(value), time.time_ns() // 1000)
        except (ValueError, OverflowError) as error:
            self.fail(f"{value!r} {error}.", param, ctx)


class HashPrefix(click.ParamType[str]):
    """The beginning of a block's hash."""

    name = "hex"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        from kvdb.listing import hash_range

        try:
            hash_range(str(value))
        except ValueError as error:
            self.fail(f"{value!r} {error}.", param, ctx)
        return str(value)


@click.command()
@click.argument("kind", metavar="KIND")
@click.option("--namespace", type=RowId(), metavar="ID", help="Only of this namespace.")
@click.option("--model", metavar="TEXT", help="Only of models whose name contains this.")
@click.option("--tenant", metavar="NAME", help="Only of this tenant.")
@click.option("--client", metavar="NAME", help="Only requests of this client.")
@click.option("--since", type=Moment(), help="Only from then on: 2h, 7d, 2026-08-31 12:00 (UTC).")
@click.option("--until", type=Moment(), help="Only before then.")
@click.option("--min-tokens", type=int, metavar="N", help="Only with at least N tokens.")
@click.option("--min-hits", type=int, metavar="N", help="Only blocks hit at least N times.")
@click.option(
    "--state",
    type=click.Choice(("live", "evicted", "writing", "dead")),
    help="Only blocks or shards in this state.",
)
@click.option("--queue", type=click.Choice(("cold", "hot")), help="Only blocks in this queue.")
@click.option(
    "--origin",
    type=click.Choice(("prefill", "decode", "import")),
    help="Only blocks of this origin.",
)
@click.option("--hash", type=HashPrefix(), metavar="HEX", help="Only blocks whose hash starts so.")
@click.option("--skip", type=click.Choice(SKIPS), help="Only requests of this kind of skip.")
@click.option("--reason", metavar="REASON", help="Only requests that missed for this reason.")
@click.option(
    "--limit",
    default=100,
    show_default=True,
    type=click.IntRange(min=0),
    help="Print at most this many rows.",
)
@output_options
@store_option
def ls(kind: str, limit: int, output: Format, **filters: Any) -> None:
    """List what the store holds, newest first.

    KIND is blocks, shards, namespaces, sequences or requests.
    """
    from kvdb.listing import LISTINGS

    if kind not in LISTINGS:
        raise click.UsageError(f"{kind!r} is none of {', '.join(LISTINGS)}.")
    listing = LISTINGS[kind]
    for name, value in filters.items():
        if value is not None and name not in listing.filters:
            raise click.UsageError(f"--{name.replace('_', '-')} does not apply to {kind}.")
    with open_store(read_only=True) as store:
        # One row more than is shown says whether there are more.
        result = store.sql(listing.sql, listing.values(filters, limit + 1), limit=limit)
    write_rows(result.columns, result.rows, output)
    if result.capped:
        say(f"Only the first {limit} rows are shown; --limit shows more.")
