"""``kvdb report``: one HTML page about the store."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from kvdb.cli.ls import Moment
from kvdb.cli.options import RowId, open_store, store_option
from kvdb.cli.output import say

SUFFIXES = (".html", ".htm")


@click.command()
@click.argument(
    "file", type=click.Path(path_type=Path, allow_dash=True), default="kvdb-report.html"
)
@click.option(
    "--since",
    type=Moment(),
    help="Only requests from then on: 12h, 7d, 2026-08-31 (UTC).",
)
@click.option("--namespace", type=RowId(), metavar="ID", help="Only of this namespace.")
@click.option("--tenant", metavar="NAME", help="Only requests of this tenant.")
@click.option("--no-text", is_flag=True, help="Show no text of any prompt.")
@store_option
def report(
    file: Path, since: int | None, namespace: int | None, tenant: str | None, no_text: bool
) -> None:
    """Draw what the store holds and saves, as one HTML page.

    FILE (kvdb-report.html unless given; - is standard output) is replaced when it is there. The
    page is about 5 MB, stands alone and loads nothing from any network. It shows how some prompts
    begin; --no-text leaves that out.
    """
    from kvdb.cli.token_text import token_decoders
    from kvdb.report import Scope, make_report

    if str(file) != "-" and file.suffix.lower() not in SUFFIXES:
        raise click.UsageError(f"{file} must end in .html, so that nothing else is replaced.")
    with open_store(read_only=True) as store:
        decoder = (lambda _: None) if no_text else token_decoders(store.path)
        page = make_report(store, Scope(since, namespace, tenant), decoder)
    if str(file) == "-":
        click.echo(page, nl=False)
    else:
        _replace(file, page)
        say(f"Wrote {file}.")


def _replace(path: Path, text: str) -> None:
    """Write all of a file or nothing. Only its owner may read it: it shows prompts."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as temp:
        try:
            temp.write(text)
            temp.flush()
            os.fsync(temp.fileno())
            Path(temp.name).replace(path)
        except BaseException:
            Path(temp.name).unlink(missing_ok=True)
            raise
