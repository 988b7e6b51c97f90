"""``kvdb evict``: make room."""

from __future__ import annotations

import dataclasses
import sys

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import human_bytes, say, write_json
from kvdb.config import size


class Size(click.ParamType[int]):
    """``10GB``, ``512MiB`` or a number of bytes."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        try:
            return size(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}.", param, ctx)


@click.command()
@click.option(
    "--to",
    "to_bytes",
    type=Size(),
    metavar="SIZE",
    help="Evict until the store takes at most this much, such as 10GB.",
)
@click.option(
    "--namespace",
    "namespace_id",
    type=int,
    metavar="ID",
    help="Evict only blocks of this namespace (see kvdb ls namespaces).",
)
@click.option("--dry-run", is_flag=True, help="Say what would go; change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@store_option
def evict(
    to_bytes: int | None, namespace_id: int | None, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Remove blocks nobody holds, least useful first, until the store is small enough.

    Held blocks (running requests, named sequences) stay. What goes is only computed again.
    """
    if to_bytes is None and namespace_id is None:
        raise click.UsageError("Say how far to go: --to SIZE, --namespace ID, or both.")
    if to_bytes is None:
        to_bytes = 0  # all of the namespace that nobody holds
    with open_store() as store:
        if not dry_run and not yes:
            plan = store.evict(to_bytes=to_bytes, namespace_id=namespace_id, dry_run=True)
            if not sys.stdin.isatty():
                raise click.UsageError(
                    f"{plan.blocks} blocks ({human_bytes(plan.nbytes)}) would go; add --yes."
                )
            question = f"Evict {plan.blocks} blocks ({human_bytes(plan.nbytes)})?"
            if not click.confirm(question, err=True):
                say("Nothing was evicted.")
                return
        report = store.evict(to_bytes=to_bytes, namespace_id=namespace_id, dry_run=dry_run)
    if as_json:
        write_json(dataclasses.asdict(report))
    else:
        verb = "Would evict" if dry_run else "Evicted"
        say(
            f"{verb} {report.blocks} blocks ({human_bytes(report.nbytes)}); "
            f"{human_bytes(report.freed_bytes)} of disk freed."
        )
