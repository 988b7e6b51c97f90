"""``kvdb query``: ask the store in SQL."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvdb.cli.interrupts import noted_interrupts
from kvdb.cli.options import open_store, store_option, timeout_option
from kvdb.cli.output import Format, output_options, say, write_rows
from kvdb.errors import MissingParameter, QueryError

if TYPE_CHECKING:
    from kvdb.sandbox import SqlResult

GRACE_SECONDS = 0.25


@click.command()
@click.argument("sql", required=False)
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read the statement from a file.",
)
@click.option(
    "-p",
    "--param",
    "parameters",
    multiple=True,
    type=(str, str),
    metavar="NAME VALUE",
    help="Value of a :name in the statement; it is text.",
)
@click.option(
    "--write",
    is_flag=True,
    help="Let the statement change settings, or delete from requests or evictions.",
)
@click.option(
    "--limit",
    default=1000,
    show_default=True,
    type=click.IntRange(min=0),
    help="Print at most this many rows.",
)
@timeout_option
@output_options
@store_option
def query(
    sql: str | None,
    file: Path | None,
    parameters: tuple[tuple[str, str], ...],
    write: bool,
    limit: int,
    timeout: float,
    output: Format,
) -> None:
    """Ask the store in SQL and print the rows.

    SQL is one SELECT over the store's tables and views; "-" reads it from standard input. It can
    only read, unless --write is given. The views are block_usage, prefix_tree, sequence_blocks,
    hit_history, hourly_hits, savings, tenant_usage, capacity, missed_prefixes, miss_reasons,
    daily_evictions and daily_wear; docs/schema.md and kvdb shell's .tables describe them all.
    Beside SQLite's functions there are tokens(blob), token_text(blob, namespace_id),
    human_bytes(n) and ago(us). Blobs are printed as hex.
    """
    statement = _statement(sql, file)
    run = _change if write else _ask
    try:
        result = run(statement, dict(parameters), limit, timeout)
    except MissingParameter as error:
        raise QueryError(f"{str(error)[:-1]}: add -p {error.name} VALUE.") from error
    write_rows(result.columns, result.rows, output)
    if result.capped:
        say(f"Only the first {limit} rows are shown; --limit shows more.")


def _ask(sql: str, parameters: dict[str, str], limit: int, timeout: float) -> SqlResult:
    from kvdb import sandbox
    from kvdb.cli.token_text import token_text_of

    sandbox.cap_process_memory(sandbox.MEMORY_BYTES)
    with (
        open_store(read_only=True) as store,
        noted_interrupts() as interrupted,
        _watchdog(timeout + GRACE_SECONDS, store.database.close),
        sandbox.bounded_memory(sandbox.MEMORY_BYTES),
    ):
        return store.sql(
            sql,
            parameters,
            limit=limit,
            deadline=timeout,
            token_text=token_text_of(store.path),
            interrupted=interrupted,
        )


def _change(sql: str, parameters: dict[str, str], limit: int, timeout: float) -> SqlResult:
    from kvdb.sandbox.write import run_write

    with open_store() as store:
        return run_write(store.database, sql, parameters, limit=limit, deadline=timeout)


def _statement(sql: str | None, file: Path | None) -> str:
    if (sql is None) == (file is None):
        raise click.UsageError("Give the statement as SQL, or with --file, or as - on stdin.")
    try:
        if file is not None:
            return file.read_text("utf-8")
        return sys.stdin.read() if sql == "-" else str(sql)
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file or 'Standard input'} is not UTF-8 text: {error}.") from error


@contextmanager
def _watchdog(seconds: float, clean_up: Callable[[], None]) -> Iterator[None]:
    """End this process if a row of long C functions outlives the deadline. Only reading goes on
    here, so there is nothing to lose."""

    def end() -> None:
        sys.stderr.write("Error: The statement could not be stopped in time and was ended.\n")
        sys.stderr.flush()
        clean_up()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
