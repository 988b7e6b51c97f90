"""Makes room for a shard, within the disk, the quotas and the limit, and reserves it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvdb import quotas
from kvdb.compaction import Compactor
from kvdb.driver import Connection, Database
from kvdb.errors import KvdbError
from kvdb.limit import Limit
from kvdb.reservation import Reservation, Reservations
from kvdb.retention import Retention

log = logging.getLogger("kvdb.writer")

# Compact before evicting once this share of the limit is dead bytes in living shards.
WASTE_SHARE = 16


class Room:
    """See the module. One per open store, used by its writer and by imports."""

    def __init__(
        self,
        database: Database,
        limit: Limit,
        keep: Retention,
        reservations: Reservations,
        compactor: Compactor,
    ) -> None:
        self._database = database
        self._limit = limit
        self._retention = keep
        self.reservations = reservations
        self._compactor = compactor

    @property
    def shard_bytes(self) -> int:
        """The largest shard worth making here."""
        return self._limit.shard_bytes

    def find(
        self,
        namespace_id: int,
        nbytes: int,
        part_bytes: int,
        protect: Callable[[Connection], set[int]],
        *,
        evict: bool = True,
    ) -> Reservation | str:
        """A reservation for a file of ``nbytes``, or why there is none: ``disk_full``, ``quota`` or
        ``limit``. ``part_bytes`` count in quotas; ``protect`` gives ids of blocks that stay.
        Without ``evict`` nothing goes to make room."""
        if not self._limit.disk_allows(nbytes):
            return "disk_full"
        with self._database.read() as connection:
            over = quotas.excess(connection, namespace_id, part_bytes)
            protected = protect(connection)
        if over is not None:
            excess, namespaces = over
            if not evict:
                return "quota"
            report = self._retention.free(
                excess, reason="quota", protect=protected, namespaces=namespaces, live=True
            )
            if report.nbytes < excess:
                return "quota"
        while True:
            with self._database.write() as connection:
                excess = self.reservations.excess(connection, nbytes)
                if excess <= 0:
                    return self.reservations.reserve(connection, namespace_id, nbytes)
                protected = protect(connection)
            if self._give_back_waste(excess):
                continue
            if not evict:
                return "limit"
            # Room goes in bigger bites than one shard, so that not every put has to evict.
            bite = max(excess, min(self._limit.shard_bytes, self._limit.max_bytes // 64))
            freed = self._retention.free(bite, protect=protected, compact=self._compact_waste)
            if freed.freed_bytes < excess:
                return "limit"

    def _give_back_waste(self, excess: int) -> bool:
        """Dead bytes between live ones go before any block does; True when some did."""
        if self._compactor.waste() <= max(excess, self._limit.max_bytes // WASTE_SHARE):
            return False
        return self._compact_waste() > 0

    def _compact_waste(self) -> int:
        try:
            return self._compactor.run(small=False).freed_bytes
        except (KvdbError, OSError) as error:
            log.warning("compaction failed: %s", error)
            return 0
