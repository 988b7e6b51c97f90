"""Options that choose among what is stored, for what goes to other machines."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import click

from kvdb.cli.evict import Size

_OPTIONS = (
    click.option(
        "--sequence",
        "sequences",
        multiple=True,
        metavar="NAME",
        help="Only the chain of this sequence; may be repeated.",
    ),
    click.option(
        "--where",
        metavar="SQL",
        help='Only blocks of which a condition on block_usage holds, such as "hits > 3", and all '
        "that they stand on.",
    ),
    click.option(
        "--model", metavar="NAME", help="Only state of this model (or namespace fingerprint)."
    ),
    click.option(
        "--max-bytes", type=Size(), metavar="SIZE", help="At most this much: the hottest blocks."
    ),
)


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Arguments ``sequences``, ``where``, ``model`` and ``max_bytes``."""
    return reduce(lambda made, option: option(made), reversed(_OPTIONS), command)
