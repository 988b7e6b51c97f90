"""A shard's way onto the disk: reserved in the index, then published as a file, or abandoned.

A ``shards`` row in state *writing* is committed before its file exists, so that a crash in between
leaves a row which the next opener settles, never a file that nobody knows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvdb import index
from kvdb.clock import Environment
from kvdb.driver import Connection, Database
from kvdb.durable import FileSystem, give_name, publish, stage
from kvdb.errors import KvdbError
from kvdb.limit import Limit, on_disk
from kvdb.shards import shard_path, temp_path

log = logging.getLogger("kvdb.writer")


@dataclass(frozen=True, slots=True)
class Reservation:
    """A ``writing`` row: room for one shard of this process."""

    id: int
    uuid: str


class Reservations:
    """See the module. One per open store, used by its writer and its compactor."""

    def __init__(
        self,
        database: Database,
        limit: Limit,
        fs: FileSystem,
        environment: Environment,
        process_id: int,
    ) -> None:
        self._database = database
        self._limit = limit
        self._fs = fs
        self._environment = environment
        self._process_id = process_id
        self._leftovers: list[Reservation] = []
        self._lock = threading.Lock()

    def excess(self, connection: Connection, nbytes: int) -> int:
        """How far a shard of ``nbytes`` would go beyond the limit; 0 or less when it fits."""
        return self._limit.used(connection) + on_disk(nbytes) - self._limit.max_bytes

    def reserve(self, connection: Connection, namespace_id: int, nbytes: int) -> Reservation:
        """Insert the row, in the caller's transaction, which has seen that there is room."""
        uuid = self._environment.new_uuid()
        (id_,) = connection.execute(
            index.INSERT_SHARD,
            (uuid, namespace_id, self._process_id, nbytes, self._environment.now_us()),
        ).fetchone()
        return Reservation(id_, uuid)

    def publish(self, place: Reservation, buffers: Sequence[memoryview]) -> None:
        """Write the file, durably. Raises OSError; the caller then abandons the reservation."""
        root = self._limit.root
        publish(self._fs, temp_path(root, place.uuid), shard_path(root, place.uuid), buffers)

    def stage(self, place: Reservation, buffers: Sequence[memoryview]) -> None:
        """Write the file, durably, under its temporary name; :meth:`settle` ends this."""
        stage(self._fs, temp_path(self._limit.root, place.uuid), buffers)

    def settle(self, place: Reservation) -> None:
        """Give a staged file its name. Raises OSError."""
        root = self._limit.root
        give_name(self._fs, temp_path(root, place.uuid), shard_path(root, place.uuid))

    def abandon(self, places: Iterable[Reservation]) -> None:
        """Remove file and row. What cannot be removed now is tried again with :meth:`retry`, and
        else settled by another process's open."""
        for place in places:
            try:
                self._fs.unlink(temp_path(self._limit.root, place.uuid))
                self._fs.unlink(shard_path(self._limit.root, place.uuid))
                with self._database.write() as connection:
                    connection.execute(index.DELETE_WRITING, (place.id,))
            except (OSError, KvdbError) as error:
                log.warning("leftover of a failed write stays for now: %s", error)
                with self._lock:
                    self._leftovers.append(place)

    def retry(self) -> None:
        """Abandon once more what could not be removed before."""
        with self._lock:
            places, self._leftovers = self._leftovers, []
        self.abandon(places)
