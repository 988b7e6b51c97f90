"""``kvdb query``: one SELECT over the store."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import Format, output_options, say, write_rows

MEMORY_BYTES = 512 << 20
GRACE_SECONDS = 1.0


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
    help="Value of a :name in the statement.",
)
@click.option(
    "--limit",
    default=1000,
    show_default=True,
    type=click.IntRange(min=0),
    help="Print at most this many rows.",
)
@click.option(
    "--timeout",
    default=10.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Stop the statement after this time.",
)
@output_options
@store_option
def query(
    sql: str | None,
    file: Path | None,
    parameters: tuple[tuple[str, str], ...],
    limit: int,
    timeout: float,
    output: Format,
) -> None:
    """Ask the store in SQL and print the rows.

    SQL is one SELECT over the store's tables and documented views (block_usage, prefix_tree,
    sequence_blocks, hit_history, hourly_hits, savings, tenant_usage, capacity, missed_prefixes);
    "-" reads it from standard input. Nothing can be written. Blobs are printed as hex.
    """
    statement = _statement(sql, file)
    from kvdb import sandbox

    sandbox.cap_process_memory(MEMORY_BYTES)
    with open_store(read_only=True) as store, _watchdog(timeout + GRACE_SECONDS):
        result = store.sql(statement, dict(parameters), limit=limit, deadline=timeout)
    write_rows(result.columns, result.rows, output)
    if result.capped:
        say(f"Only the first {limit} rows are shown; --limit shows more.")


def _statement(sql: str | None, file: Path | None) -> str:
    if (sql is None) == (file is None):
        raise click.UsageError("Give the statement as SQL, or with --file, or as - on stdin.")
    if file is not None:
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise click.UsageError(f"{file} is not a text file: {error}.") from error
    return sys.stdin.read() if sql == "-" else str(sql)


@contextmanager
def _watchdog(seconds: float) -> Iterator[None]:
    """End this process if one long C function outlives the deadline. Only reading goes on here,
    so there is nothing to lose."""

    def end() -> None:
        sys.stderr.write("Error: The statement could not be stopped in time.\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
