"""``kvdb pin``: keep a block and all before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import say
from kvdb.errors import StoreMissing, UsageError

if TYPE_CHECKING:
    from kvdb.match import Namespace
    from kvdb.store import Store


def find_block(store: Store, prefix: str) -> tuple[Namespace, bytes]:
    """The one stored block whose hash starts with ``prefix`` (hex), and its namespace. Raises
    StoreMissing or UsageError."""
    if not prefix:
        raise UsageError("Give the hash of a block, or its start.")
    rows = store.sql(
        "SELECT hash, namespace_id FROM block_usage "
        "WHERE substr(hash, 1, length(?1)) = lower(?1) LIMIT 2",
        [prefix],
    ).rows
    if not rows:
        raise StoreMissing(f"No stored block's hash starts with {prefix!r}; see kvdb ls blocks.")
    if len(rows) > 1:
        raise UsageError(f"More than one block's hash starts with {prefix!r}; give more of it.")
    namespace = next(n for n in store.namespaces() if n.id == rows[0][1])
    return namespace, bytes.fromhex(rows[0][0])


@click.command()
@click.argument("block", metavar="HASH")
@click.option("--name", help="Name of the pin; by default the first 16 digits of the hash.")
@click.option("--ttl", type=click.FloatRange(min=0), metavar="SECONDS", help="Until then only.")
@store_option
def pin(block: str, name: str | None, ttl: float | None) -> None:
    """Keep the block HASH (or the start of its hash) and all before it from eviction.

    A pin is a named sequence: kvdb sequences lists it, kvdb unpin NAME ends it.
    """
    with open_store() as store:
        namespace, hash_ = find_block(store, block)
        name = name or hash_.hex()[:16]
        store.sequence(namespace, hash_, name=name, ttl_seconds=ttl)
    say(f"Pinned as {name}.")
