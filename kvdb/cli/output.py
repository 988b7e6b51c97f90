"""Rows to stdout in sqlite-utils' formats; talk to stderr."""

from __future__ import annotations

import csv
import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import click

Function = TypeVar("Function", bound=Callable[..., Any])
UNITS = ("B", "kB", "MB", "GB", "TB")


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
    )
    names = tuple(Format.__dataclass_fields__)

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        chosen = Format(**{name: options.pop(name) for name in names})
        if chosen.csv + chosen.tsv + bool(chosen.table or chosen.fmt) > 1:
            raise click.UsageError("Use one of --csv, --tsv and --table.")
        _check_table_format(chosen.fmt)
        return function(*args, output=chosen, **options)

    decorated: Any = wrapped
    for flag in reversed(flags):
        decorated = flag(decorated)
    return cast("Function", decorated)


def write_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]], output: Format) -> None:
    """Write all rows to stdout."""
    names = _distinct(columns)
    cells = ([_cell(value) for value in row] for row in rows)
    if output.csv or output.tsv:
        writer = csv.writer(
            sys.stdout, dialect="excel-tab" if output.tsv else "excel", lineterminator="\n"
        )
        if not output.no_headers:
            writer.writerow(names)
        writer.writerows(cells)
    elif output.table or output.fmt:
        headers = () if output.no_headers else names
        click.echo(table(headers, list(cells), output.fmt or "simple"))
    else:
        _write_json(names, cells, output)


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], style: str = "simple") -> str:
    """A text table: numbers to the right, and text such as ``1e5`` left as it is."""
    from tabulate import tabulate

    def numeric(column: int) -> bool:
        return all(isinstance(row[column], int | float | None) for row in rows)

    align = ["right" if numeric(n) else "left" for n in range(len(rows[0]))] if rows else None
    text: str = tabulate(
        rows, headers=headers, tablefmt=style, disable_numparse=True, colalign=align, missingval=""
    )
    return text


def write_json(document: object) -> None:
    """Write one JSON document to stdout."""
    click.echo(json.dumps(document, indent=2, default=_cell, ensure_ascii=False))


def say(text: str = "", *, nl: bool = True) -> None:
    """Talk: to stderr."""
    click.echo(text, err=True, nl=nl)


def human_bytes(nbytes: int) -> str:
    """``1.2 GB``."""
    value = float(nbytes)
    for unit in UNITS:
        if value < 1000 or unit == UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _write_json(names: Sequence[str], rows: Iterable[list[Any]], output: Format) -> None:
    def encode(row: list[Any]) -> str:
        if output.json_cols:
            row = [_parsed(value) for value in row]
        value = row if output.arrays else dict(zip(names, row, strict=True))
        return json.dumps(value, ensure_ascii=output.ascii, default=str)

    if output.nl:
        for row in rows:
            click.echo(encode(row))
        return
    separator = "["
    for row in rows:
        click.echo(separator + encode(row), nl=False)
        separator = ",\n "
    click.echo("]" if separator != "[" else "[]")


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
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
