"""``kvdb export``: state as one file."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import human_bytes, say, write_json
from kvdb.cli.progress import progress
from kvdb.cli.selecting import selection_options
from kvdb.errors import StoreReadOnly, StoreUnavailable

if TYPE_CHECKING:
    from kvdb.encryption import Lock
    from kvdb.store import Store

PASSPHRASE = "passphrase"  # noqa: S105 - a word of the command line


@click.command()
@click.argument("file", metavar="FILE|-")
@selection_options
@click.option(
    "--since",
    metavar="SNAPSHOT|TIME",
    help="Only what is not in a snapshot (its file, or an export's digest), or was stored after "
    "a time: 2026-05-01T12:30, or 3d ago. The importing store needs the rest.",
)
@click.option("--codec", metavar="NAME", help="Encode parts anew (raw, lz4, zstd).")
@click.option(
    "--no-tokens",
    is_flag=True,
    help="Leave the prompts' tokens out. Importing it takes --trust: nothing proves any more which "
    "prompt a state belongs to.",
)
@click.option(
    "--encrypt",
    multiple=True,
    metavar="RECIPIENT|passphrase",
    help="Encrypt for an age recipient (age1… or ssh-…, may be repeated), or under a passphrase "
    "(KVDB_PASSPHRASE, or asked for).",
)
@click.option("--dry-run", is_flag=True, help="Say what would be exported; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object (not with -).")
@store_option
def export(
    file: str,
    sequences: tuple[str, ...],
    where: str | None,
    model: str | None,
    since: str | None,
    codec: str | None,
    max_bytes: int | None,
    no_tokens: bool,
    encrypt: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write stored state to FILE, or to stdout with -, for kvdb import on any machine.

    The same state gives the same bytes. An interrupted export goes on when it is repeated. Other
    programs may use the store meanwhile.
    """
    if file == "-" and sys.stdout.isatty() and not dry_run:
        raise click.UsageError("A snapshot is not for a terminal: write it to a file or a pipe.")
    if file == "-" and as_json and not dry_run:
        raise click.UsageError("With - stdout is for the snapshot; leave --json away.")
    lock = _lock(encrypt)
    with _open() as store, progress("Blocks exported") as report:
        done = store.export_snapshot(
            sys.stdout.buffer if file == "-" else file,
            sequences=sequences,
            where=where,
            model=model,
            since=since,
            codec=codec,
            max_bytes=max_bytes,
            tokens=not no_tokens,
            lock=lock,
            dry_run=dry_run,
            progress=report,
        )
    if file == "-":
        sys.stdout.buffer.flush()
    if as_json:
        write_json(dataclasses.asdict(done))
        return
    if dry_run:
        say(
            f"Would export {done.blocks} blocks ({human_bytes(done.nbytes)} of state) and "
            f"{done.sequences} named sequences."
        )
        return
    rest = f", {done.skipped} went meanwhile" if done.skipped else ""
    rest += f", {done.resumed} of them by an earlier run" if done.resumed else ""
    say(
        f"Exported {done.blocks} blocks and {done.sequences} named sequences "
        f"({human_bytes(done.nbytes)}){rest}. Digest {done.digest[:16]}."
    )


def _open() -> Store:
    """The store, for reading only where it cannot be written: nothing is held then."""
    try:
        return open_store()
    except (StoreReadOnly, StoreUnavailable):
        return open_store(read_only=True)


def _lock(encrypt: tuple[str, ...]) -> Lock | None:
    if not encrypt:
        return None
    from kvdb.cli.passphrase import ask_passphrase
    from kvdb.encryption import Lock

    if PASSPHRASE not in encrypt:
        return Lock(encrypt)
    if len(encrypt) > 1:
        raise click.UsageError("--encrypt takes recipients or a passphrase, not both.")
    return Lock(passphrase=ask_passphrase(confirm=True))
