"""``kvdb import``: take the state that a snapshot holds."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import human_bytes, say, write_json
from kvdb.cli.progress import progress

if TYPE_CHECKING:
    from kvdb.encryption import Keys
    from kvdb.snapshot.importing import ImportReport
    from kvdb.snapshot.stream import Readable

REASONS = {
    "parent_missing": "stand on blocks that are neither here nor in the snapshot",
    "too_large": "are larger than this store keeps (max_bytes / 4)",
}


@click.command("import")
@click.argument("file", metavar="FILE|-")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check all of it and say what is new, present or incompatible; store nothing.",
)
@click.option(
    "--trust",
    is_flag=True,
    help="Take a snapshot without tokens: nothing proves which prompts its state belongs to.",
)
@click.option(
    "--identity",
    "identities",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="age identity (or SSH private key) that opens an encrypted snapshot; may be repeated.",
)
@click.option(
    "--passphrase",
    is_flag=True,
    help="Open a snapshot that is encrypted under a passphrase (KVDB_PASSPHRASE, or asked for).",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@store_option
def import_(
    file: str,
    dry_run: bool,
    trust: bool,
    identities: tuple[Path, ...],
    passphrase: bool,
    as_json: bool,
) -> None:
    """Store what the snapshot FILE (from a pipe with -) holds and the store lacks.

    Every byte is checked first: a damaged or forged snapshot leaves the store as it was. State is
    for models of the same content, whatever their name or folder.
    """
    keys = _keys(identities, passphrase)
    with (
        open_store(create=not dry_run, read_only=dry_run) as store,
        progress("Snapshot read", human_bytes) as report,
    ):
        done = store.import_snapshot(
            cast("Readable", sys.stdin.buffer) if file == "-" else file,
            keys=keys,
            dry_run=dry_run,
            trust=trust,
            progress=report,
        )
    if as_json:
        write_json(dataclasses.asdict(done))
    else:
        _say_what(done, dry_run)


def _keys(identities: tuple[Path, ...], passphrase: bool) -> Keys | None:
    if not identities and not passphrase:
        return None
    from kvdb.cli.passphrase import ask_passphrase
    from kvdb.encryption import Keys, read_identities

    return Keys(
        [key for path in identities for key in read_identities(path)],
        ask_passphrase(confirm=False) if passphrase else None,
    )


def _say_what(done: ImportReport, dry_run: bool) -> None:
    for space in done.namespaces:
        name = space.model or space.fingerprint[:16]
        if space.known:
            say(f"{name}: known here.")
        elif space.differs:
            say(f"{name}: new here; the nearest of those here has not {'; '.join(space.differs)}.")
        else:
            say(f"{name}: new here.")
    verb = "would be stored" if dry_run else "stored"
    new = done.new if dry_run else done.stored
    size = human_bytes(done.nbytes)
    say(f"{done.blocks} blocks: {new} {verb} ({size}), {done.present} were here.")
    for reason, count in done.incompatible.items():
        say(f"{count} left out: they {REASONS[reason]}.")
    if done.sequences:
        say(f"Named sequences: {', '.join(done.sequences)}.")
    for name, why in done.sequences_left:
        say(f"The sequence {name!r} was left out: {why}")
