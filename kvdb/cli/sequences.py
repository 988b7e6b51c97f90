"""``kvdb sequences``: names that hold a chain of blocks."""

from __future__ import annotations

from typing import Any

import click

from kvdb.cli.generate import has_template
from kvdb.cli.options import (
    max_memory_option,
    open_store,
    prepare_engine,
    settings,
    store_option,
)
from kvdb.cli.output import Format, output_options, say, write_rows
from kvdb.cli.pin import find_block
from kvdb.cli.prompts import as_chat, prompt_options, read_prompt

MAX_ROWS = 100_000


@click.group(invoke_without_command=True)
@click.pass_context
def sequences(ctx: click.Context) -> None:
    """List, show, save, fork and drop named sequences; without a command: list them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_sequences)


@sequences.command("list")
@output_options
@store_option
def list_sequences(output: Format) -> None:
    """List all sequences, running ones too."""
    from kvdb.listing import LISTINGS

    listing = LISTINGS["sequences"]
    with open_store(read_only=True) as store:
        result = store.sql(listing.sql, listing.values({}, MAX_ROWS), limit=MAX_ROWS)
    write_rows(result.columns, result.rows, output)


@sequences.command()
@click.argument("name")
@click.option("--request", "request_id", type=int, metavar="ID", help="What that request stored.")
@click.option("--block", metavar="HASH", help="The chain up to that block.")
@prompt_options("Chat messages as a JSON list, or a request body.")
@click.option("--model", default="smollm2-135m", show_default=True, help="Model of the prompt.")
@click.option("--ttl", type=click.FloatRange(min=0), metavar="SECONDS", help="Until then only.")
@click.option("--tenant", default="", help="In whose quota it counts.")
@max_memory_option
@store_option
def save(
    name: str,
    request_id: int | None,
    block: str | None,
    ttl: float | None,
    tenant: str,
    **options: Any,
) -> None:
    """Keep state under NAME, so that whatever begins like it hits: a prompt's, which is computed
    if it is not stored, a request's (see kvdb ls requests), or a block's.

    Of chat messages it is the state after the last one. It stays until kvdb sequences drop NAME.
    """
    prompts = (options["prompt"], options["messages_file"], options["tokens_file"])
    if sum(given is not None for given in (request_id, block, *prompts)) != 1:
        raise click.UsageError("Give one of --prompt, --messages, --tokens, --request and --block.")
    if request_id is None and block is None:
        _save_prompt(name, ttl, tenant, options)
        return
    from kvdb.sequences import request_tip

    with open_store() as store:
        if request_id is not None:
            namespace, hash_ = request_tip(store, request_id)
        else:
            namespace, hash_ = find_block(store, block or "")
        sequence = store.sequence(namespace, hash_, name=name, ttl_seconds=ttl, tenant=tenant)
        say(f"{name} holds {len(sequence.tokens())} tokens.")


def _save_prompt(name: str, ttl: float | None, tenant: str, options: dict[str, Any]) -> None:
    values = settings()
    given = read_prompt(options["prompt"], options["messages_file"], options["tokens_file"])
    prepare_engine(values)
    from engine import Engine, EngineOptions, Request
    from engine.sequences import save_sequence

    engine_options = EngineOptions(
        block_tokens=values["block_tokens"], max_memory=values["max_memory"]
    )
    with (
        open_store(values, create=True) as store,
        Engine(store, options["model"], options=engine_options) as engine,
    ):
        chat = as_chat(
            given,
            template=has_template(engine),
            raw=options["ignore_chat_template"],
            system=options["system_prompt"],
        )
        request = Request(**chat, reuse=values["reuse"], tenant=tenant, client="kvdb sequences")
        saved = save_sequence(engine, store, name, request, ttl)
    say(f"{name} holds {saved.tokens} tokens, of which {saved.computed_tokens} were computed.")


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
            limit=MAX_ROWS,
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
