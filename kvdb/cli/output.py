"""Rows to stdout in sqlite-utils' formats; talk to stderr."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import click

from kvdb.errors import KvdbError
from kvdb.functions import human_bytes as human_bytes  # talk and tables show sizes so

Function = TypeVar("Function", bound=Callable[..., Any])
# A table is laid out as a whole, in several times the memory of its cells.
MAX_TABLE_CHARACTERS = 4_000_000


class OutputError(KvdbError):
    """Rows cannot be written in the format that was asked for."""


@dataclass(frozen=True, slots=True)
class Format:
    """How rows are written. With nothing set: a JSON array of objects."""

    nl: bool = False
    arrays: bool = False
    csv: bool = False
    tsv: bool = False
    no_headers: bool = False
    table: bool = False
    fmt: str | None = None
    json_cols: bool = False
    ascii: bool = False
    raw: bool = False
    raw_lines: bool = False


def output_options(function: Function) -> Function:
    """sqlite-utils' output flags; the verb gets them as one ``output``: :class:`Format`."""
    flags = (
        click.option("--nl", is_flag=True, help="Newline-delimited JSON."),
        click.option("--arrays", is_flag=True, help="JSON rows as arrays instead of objects."),
        click.option("--csv", is_flag=True, help="CSV."),
        click.option("--tsv", is_flag=True, help="Tab-separated values."),
        click.option("--no-headers", is_flag=True, help="No header row in CSV, TSV and tables."),
        click.option("-t", "--table", is_flag=True, help="A formatted table."),
        click.option("--fmt", metavar="NAME", help="Table format of tabulate, such as github."),
        click.option("--json-cols", is_flag=True, help="JSON text as JSON, not as a string."),
        click.option("--ascii", is_flag=True, help="Escape non-ASCII characters in JSON."),
        click.option("-r", "--raw", is_flag=True, help="The first column of the first row, bare."),
        click.option("--raw-lines", is_flag=True, help="The first column of each row, bare."),
    )
    names = tuple(Format.__dataclass_fields__)

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        chosen = Format(**{name: options.pop(name) for name in names})
        kinds = (chosen.csv, chosen.tsv, bool(chosen.table or chosen.fmt), chosen.nl)
        if sum((*kinds, chosen.raw, chosen.raw_lines)) > 1:
            raise click.UsageError("Use one of --csv, --tsv, --table, --nl, --raw and --raw-lines.")
        _check_table_format(chosen.fmt)
        return function(*args, output=chosen, **options)

    decorated: Any = wrapped
    for flag in reversed(flags):
        decorated = flag(decorated)
    return cast("Function", decorated)


def write_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], output: Format) -> None:
    """Write all rows to stdout.

    What goes to a file or a pipe is exact; on a terminal nothing in it can steer the terminal.
    Raises OutputError for a table that is too large to lay out.
    """
    from kvdb.cli import terminal

    to_terminal = terminal.is_terminal()
    if (output.raw or output.raw_lines) and not to_terminal:
        _write_raw(rows, output)
        return
    room = terminal.columns() if to_terminal else None
    for piece in rendered(columns, rows, output, room=room):
        if to_terminal:
            piece = terminal.visible(piece, keep="\n\t")
        # No lone surrogate may stop a result half-way.
        sys.stdout.write(piece.encode("utf-8", "backslashreplace").decode())
    sys.stdout.flush()


def rendered(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    output: Format,
    *,
    room: int | None = None,
) -> Iterator[str]:
    """Pieces of text that make up the rows. A table is fitted into ``room`` columns."""
    if output.raw or output.raw_lines:
        for row in rows if output.raw_lines else rows[:1]:
            yield str(_cell(row[0])) + "\n" * output.raw_lines
        return
    names = _distinct(columns)
    cells = ([_cell(value) for value in row] for row in rows)
    if output.csv or output.tsv:
        yield from _separated(names, cells, output)
    elif output.table or output.fmt:
        headers = () if output.no_headers else names
        yield table(headers, list(cells), output.fmt or "simple", room=room) + "\n"
    else:
        yield from _json(names, cells, output)


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[Any]],
    style: str = "simple",
    *,
    room: int | None = None,
) -> str:
    """A text table: numbers to the right, text such as ``1e5`` left as it is, one line a row.

    In ``room`` columns long text is shortened; where that is not enough, each row becomes lines
    of ``name  value``. Raises OutputError when it is too large to lay out.
    """
    from tabulate import tabulate

    from kvdb.cli import terminal

    numeric = [
        all(isinstance(row[n], int | float | None) for row in rows)
        for n in range(len(rows[0]) if rows else 0)
    ]
    texts = [["" if v is None else terminal.visible(str(_cell(v))) for v in row] for row in rows]
    headers = [terminal.visible(str(name)) for name in headers]
    if sum(len(text) for row in texts for text in row) > MAX_TABLE_CHARACTERS:
        raise OutputError("The result is too large for a table; use --csv or --nl.")
    if room is not None and texts and style in ("simple", "plain"):
        headers = headers or [""] * len(numeric)
        widths = terminal.fitted(headers, texts, numeric, room)
        if widths is None:
            return terminal.records(headers, texts, room)
        return terminal.grid(headers, texts, numeric, widths)
    align = ["right" if number else "left" for number in numeric] or None
    text: str = tabulate(
        texts, headers=headers, tablefmt=style, disable_numparse=True, colalign=align
    )
    return text


def write_json(document: object) -> None:
    """Write one JSON document to stdout."""
    click.echo(_inert(json.dumps(document, indent=2, default=_cell, ensure_ascii=False)))


def say(text: str = "", *, nl: bool = True) -> None:
    """Talk: to stderr."""
    from kvdb.cli.terminal import visible

    click.echo(visible(text, keep="\n\r\t"), err=True, nl=nl)


def _write_raw(rows: Sequence[Sequence[Any]], output: Format) -> None:
    end = b"\n" if output.raw_lines else b""
    stdout = sys.stdout.buffer
    for row in rows if output.raw_lines else rows[:1]:
        value = row[0]
        if not isinstance(value, bytes):
            value = str(value).encode("utf-8", "backslashreplace")
        stdout.write(value + end)
    stdout.flush()


def _separated(
    names: Sequence[str], rows: Iterable[Sequence[Any]], output: Format
) -> Iterator[str]:
    buffer = io.StringIO()
    dialect = "excel-tab" if output.tsv else "excel"
    writer = csv.writer(buffer, dialect=dialect, lineterminator="\n")
    for row in rows if output.no_headers else itertools.chain([names], rows):
        writer.writerow(row)
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()


def _json(names: Sequence[str], rows: Iterable[list[Any]], output: Format) -> Iterator[str]:
    def encode(row: list[Any]) -> str:
        if output.json_cols:
            row = [_parsed(value) for value in row]
        value = row if output.arrays else dict(zip(names, row, strict=True))
        return _inert(json.dumps(value, ensure_ascii=output.ascii, default=str))

    if output.nl:
        for row in rows:
            yield encode(row) + "\n"
        return
    separator = "["
    for row in rows:
        yield separator + encode(row)
        separator = ",\n "
    yield "]\n" if separator != "[" else "[]\n"


def _inert(document: str) -> str:
    """JSON of the same meaning in which no character can steer a terminal."""
    from kvdb.cli.terminal import UNSAFE

    return UNSAFE.sub(
        lambda match: match[0] if match[0] == "\n" else f"\\u{ord(match[0]):04x}", document
    )


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _cell(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def _distinct(columns: Sequence[str]) -> list[str]:
    """Two columns of one name must both reach a JSON object: ``id, id_2``."""
    names: list[str] = []
    for column in columns:
        name, number = column, 2
        while name in names:
            name, number = f"{column}_{number}", number + 1
        names.append(name)
    return names


def _check_table_format(name: str | None) -> None:
    if name is not None:
        from tabulate import tabulate_formats

        if name not in tabulate_formats:
            raise click.BadParameter(
                f"{name!r} is not one of {', '.join(tabulate_formats)}.", param_hint="--fmt"
            )
