"""``kvdb sequences``: names that hold a chain of blocks."""

from __future__ import annotations

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import Format, output_options, say, write_rows


@click.group(invoke_without_command=True)
@click.pass_context
def sequences(ctx: click.Context) -> None:
    """List, show, fork and drop named sequences; without a command: list them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_sequences)


@sequences.command("list")
@output_options
@store_option
def list_sequences(output: Format) -> None:
    """List all sequences, running ones too."""
    from kvdb.listing import LISTINGS

    with open_store(read_only=True) as store:
        result = store.sql(LISTINGS["sequences"].sql, {"namespace": None}, limit=100_000)
    write_rows(result.columns, result.rows, output)


@sequences.command()
@click.argument("name")
@output_options
@store_option
def show(name: str, output: Format) -> None:
    """List the blocks that NAME holds, root first."""
    with open_store(read_only=True) as store:
        store.find_sequence(name)
        result = store.sql(
            "SELECT depth, hash, token_count, state, refs FROM sequence_blocks WHERE name = ? "
            "ORDER BY depth",
            [name],
            limit=100_000,
        )
    write_rows(result.columns, result.rows, output)


@sequences.command()
@click.argument("name")
@click.argument("new")
@store_option
def fork(name: str, new: str) -> None:
    """Let NEW hold what NAME holds; copies nothing."""
    with open_store() as store:
        store.find_sequence(name).fork(new)
    say(f"{new} holds what {name} holds.")


@sequences.command()
@click.argument("name")
@store_option
def drop(name: str) -> None:
    """Let NAME hold nothing any more. Its blocks stay until they are evicted."""
    with open_store() as store:
        store.find_sequence(name).drop()
    say(f"{name} was dropped.")
