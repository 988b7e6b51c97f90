"""Where a passphrase comes from: ``KVDB_PASSPHRASE``, or whoever sits at the terminal."""

from __future__ import annotations

import os

import click

from kvdb.config import PASSPHRASE_VARIABLE


def ask_passphrase(*, confirm: bool) -> str:
    """Raises click.UsageError for an empty one, and where nobody can be asked."""
    given = os.environ.get(PASSPHRASE_VARIABLE)
    if given is None:
        try:
            given = click.prompt(
                "Passphrase", hide_input=True, confirmation_prompt=confirm, err=True
            )
        except click.Abort as error:
            raise click.UsageError(f"Set {PASSPHRASE_VARIABLE}: there is nobody to ask.") from error
    if not given:
        raise click.UsageError("The passphrase is empty.")
    return str(given)
