"""A part that cannot be read as stored: moved meanwhile, or damage that is dropped and said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdb import index
from kvdb.layout import Layout
from kvdb.reader import Location

if TYPE_CHECKING:
    from kvdb.store import Store


def report_damage(store: Store, location: Location, detail: str) -> Location | None:
    """If the part's row still names the same place it is damage: the part is dropped, with its
    reason in ``evictions``, and the answer is None. Else returns where the part lies now."""
    with store.database.read() as connection:
        row = connection.execute(index.PART_LOCATION, (location.block_id, location.part)).fetchone()
    if row is None:
        return None
    now = Location(location.block_id, location.hash, location.part, *row)
    if (now.shard, now.offset) != (location.shard, location.offset):
        return now
    if not store.read_only:
        _drop(store, location, detail)
    return None


def _drop(store: Store, location: Location, detail: str) -> None:
    reason = "missing" if "cannot be opened" in detail else "damaged"
    with store.database.write() as connection:
        row = connection.execute(index.PART_LOCATION, (location.block_id, location.part)).fetchone()
        if row is None or row[0] != location.shard or row[1] != location.offset:
            return
        shards = [s for (s,) in connection.execute(index.BLOCK_SHARDS, (location.block_id,))]
        (layout,) = connection.execute(index.BLOCK_LAYOUT, (location.block_id,)).fetchone()
        spec = Layout.from_json(layout).by_name.get(location.part)
        index.drop_part(
            connection,
            location.block_id,
            location.part,
            required=spec is None or spec.required,
            now=store.environment.now_us(),
            reason=reason,
            detail=detail,
        )
        dead = index.kill_if_empty(connection, shards)
    if dead:
        store.require_retention().sweep_dead()
