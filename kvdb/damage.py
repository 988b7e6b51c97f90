"""A part that cannot be read as stored: moved meanwhile, or damage that is dropped and said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kvdb import index
from kvdb.clock import Environment
from kvdb.driver import Database
from kvdb.errors import KvdbError
from kvdb.layout import Layout
from kvdb.reader import Damaged, Location
from kvdb.retention import Retention

log = logging.getLogger("kvdb.reader")

ReportDamage = Callable[[Location, Damaged], Location | None]
R = TypeVar("R")


def read_or_report(
    report: ReportDamage, place: Location | None, read: Callable[[Location], R]
) -> R | None:
    """What ``read`` makes of a part, looked up once more where it moved meanwhile (compaction);
    None when it is gone or damaged."""
    for _ in range(2):
        if place is None:
            return None
        try:
            return read(place)
        except Damaged as damage:
            place = report(place, damage)
    return None


class DamageDesk:
    """Where readers report. Without ``keep`` (a read-only store) nothing is dropped."""

    def __init__(
        self, database: Database, environment: Environment, keep: Retention | None
    ) -> None:
        self._database = database
        self._environment = environment
        self._retention = keep

    def report(self, location: Location, damage: Damaged) -> Location | None:
        """If the part's row still names the same place it is damage: the part is dropped, with
        its reason in ``evictions``, and the answer is None. Else returns where it lies now.

        What merely cannot be read now is not dropped. Never raises for a part that cannot be
        dropped: it stays a miss."""
        if damage.reason == "unreadable":
            return None
        try:
            with self._database.read() as connection:
                row = connection.execute(
                    index.PART_LOCATION, (location.block_id, location.part)
                ).fetchone()
            if row is None:
                return None
            now = Location(location.block_id, location.hash, location.part, *row)
            if (now.shard, now.offset) != (location.shard, location.offset):
                return now
            if self._retention is not None:
                self._drop(self._retention, location, damage)
        except (KvdbError, OSError) as error:
            log.warning("a damaged part could not be dropped: %s", error)
        return None

    def _drop(self, keep: Retention, location: Location, damage: Damaged) -> None:
        with self._database.write() as connection:
            row = connection.execute(
                index.PART_LOCATION, (location.block_id, location.part)
            ).fetchone()
            if row is None or (row[0], row[1]) != (location.shard, location.offset):
                return
            shards = [s for (s,) in connection.execute(index.BLOCK_SHARDS, (location.block_id,))]
            (layout,) = connection.execute(index.BLOCK_LAYOUT, (location.block_id,)).fetchone()
            spec = Layout.from_json(layout).by_name.get(location.part)
            index.drop_part(
                connection,
                location.block_id,
                location.part,
                required=spec is None or spec.required,
                now=self._environment.now_us(),
                reason=damage.reason,
                detail=str(damage),
            )
            dead = index.kill_if_empty(connection, shards)
        if dead:
            keep.sweep_dead()
