"""What stays and what goes: LRU-2 with history, an adapting cold share, and the hard limit.

Once-seen blocks queue as *cold*, twice-seen as *hot* (LRU-2, O'Neil et al., SIGMOD 1993). Evicted
rows keep their ticks: a block that comes back is not new. How many cold blocks to keep adapts to
hits in that history, as the target of ARC does (Megiddo and Modha, FAST 2003).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from kvdb import index
from kvdb.clock import Environment
from kvdb.driver import Connection, Database
from kvdb.durable import FileSystem
from kvdb.limit import Limit
from kvdb.reader import ShardReader
from kvdb.shards import shard_path

# Touches this close to the first reference count once: one request touches a block several times.
TOUCH_WINDOW_TICKS = 1
VICTIM_BATCH = 64
MAX_CHAIN_WALK = 64
GHOST_TRIM_BATCH = 256

COLD_VICTIMS = (
    "SELECT id, last_access FROM blocks INDEXED BY blocks_victims_cold "
    "WHERE refs = 0 AND state = 'live' AND queue = 'cold' ORDER BY last_access, depth DESC LIMIT ?"
)
HOT_VICTIMS = (
    "SELECT id, prev_access FROM blocks INDEXED BY blocks_victims_hot "
    "WHERE refs = 0 AND state = 'live' AND queue = 'hot' ORDER BY prev_access, depth DESC LIMIT ?"
)
PARENT = (
    "SELECT p.id, p.refs, p.state, p.queue, p.last_access, p.prev_access "
    "FROM blocks AS b JOIN blocks AS p ON p.id = b.parent_id WHERE b.id = ?"
)
TOUCH = (
    "UPDATE blocks SET hits = hits + 1, prev_access = last_access, last_access = ?1, queue = 'hot' "
    "WHERE id = ?2 AND ?1 - last_access > ?3"
)
READMIT = "UPDATE blocks SET queue = 'hot', prev_access = last_access, last_access = ? WHERE id = ?"
REMEMBERED = "SELECT count(*) FROM blocks WHERE refs = 0 AND state = 'evicted'"
FORGET = (
    "DELETE FROM blocks WHERE id IN (SELECT id FROM blocks AS b WHERE refs = 0 "
    "AND state = 'evicted' AND NOT EXISTS (SELECT 1 FROM blocks WHERE parent_id = b.id) "
    "ORDER BY last_access LIMIT ?)"
)


@dataclass(slots=True)
class EvictionReport:
    """What an eviction did: whole blocks, their stored bytes, and bytes given back to the disk."""

    blocks: int = 0
    nbytes: int = 0
    freed_bytes: int = 0
    shards: list[str] = field(default_factory=list)


def touch(connection: Connection, block_ids: Iterable[int]) -> None:
    """Count one reference to each block, in one tick."""
    tick = index.next_tick(connection)
    connection.executemany(TOUCH, [(tick, id_, TOUCH_WINDOW_TICKS) for id_ in block_ids])


def readmit(connection: Connection, row: index.BlockRow, tick: int) -> None:
    """A remembered block is about to be live again: it was seen twice, so it is hot."""
    adapt(connection, row.queue)
    connection.execute(READMIT, (tick, row.id))


def adapt(connection: Connection, queue: str) -> None:
    """A remembered block was asked for again: its queue was too small."""
    counters = index.counters(connection)
    live = counters["live_cold"] + counters["live_hot"]
    step = max(1, live // 100)
    target = counters["cold_target"] + (step if queue == "cold" else -step)
    connection.execute(
        "UPDATE counters SET value = ? WHERE name = 'cold_target'", (max(0, min(live, target)),)
    )


class Retention:
    """Evicts blocks and gives their shards' bytes back. Safe to run in several processes."""

    def __init__(
        self,
        database: Database,
        limit: Limit,
        reader: ShardReader,
        fs: FileSystem,
        environment: Environment,
    ) -> None:
        self._database = database
        self._limit = limit
        self._reader = reader
        self._fs = fs
        self._environment = environment

    def free(
        self,
        nbytes: int,
        *,
        reason: str = "limit",
        protect: Collection[int] = (),
        namespace_id: int | None = None,
        progress: Callable[[EvictionReport], None] | None = None,
    ) -> EvictionReport:
        """Evict least valuable blocks until ``nbytes`` are given back or nothing can go.

        Leaves go before their parents, so what remains are usable prefixes. ``protect`` are block
        ids that stay. Works in short transactions; may be interrupted at any point.
        """
        report = EvictionReport()
        while report.freed_bytes < nbytes:
            with self._database.write(durable=True) as connection:
                batch, dead = self._evict_batch(
                    connection, nbytes - report.freed_bytes, reason, protect, namespace_id
                )
            if batch.blocks == 0:
                break
            report.blocks += batch.blocks
            report.nbytes += batch.nbytes
            report.freed_bytes += self.remove_dead(dead)
            report.shards += [uuid for _, uuid, _ in dead]
            if progress is not None:
                progress(report)
        return report

    def _evict_batch(
        self,
        connection: Connection,
        nbytes: int,
        reason: str,
        protect: Collection[int],
        namespace_id: int | None,
    ) -> tuple[EvictionReport, list[tuple[int, str, int]]]:
        now = self._environment.now_us()
        report = EvictionReport()
        dead: list[tuple[int, str, int]] = []
        for block_id in _victims(connection, protect, namespace_id):
            size, shards = index.evict_block(connection, block_id, now=now, reason=reason)
            report.blocks += 1
            report.nbytes += size
            dead += index.kill_if_empty(connection, shards)
            if report.blocks >= VICTIM_BATCH or sum(d[2] for d in dead) >= nbytes:
                break
        self._forget(connection)
        return report, dead

    def _forget(self, connection: Connection) -> None:
        """Keep the history of evicted rows under twice the live ones."""
        counters = index.counters(connection)
        live = counters["live_cold"] + counters["live_hot"]
        (remembered,) = connection.execute(REMEMBERED).fetchone()
        excess = remembered - 2 * max(live, VICTIM_BATCH)
        if excess > 0:
            connection.execute(FORGET, (min(excess, GHOST_TRIM_BATCH),))

    def remove_dead(self, dead: Iterable[tuple[int, str, int]]) -> int:
        """Unlink dead shards whose rows are durably dead, then delete the rows. Returns bytes."""
        dead = list(dead)
        for _, uuid, _ in dead:
            self._reader.forget(uuid)
            self._fs.unlink(shard_path(self._limit.root, uuid))
        if dead:
            with self._database.write() as connection:
                connection.executemany(index.DELETE_SHARD, [(id_,) for id_, _, _ in dead])
        return sum(nbytes for _, _, nbytes in dead)

    def sweep_dead(self) -> int:
        """Finish every removal that some process began. Returns the bytes given back."""
        with self._database.write(durable=True) as connection:
            # The write makes this commit sync the WAL, and with it the commit that killed them.
            connection.execute("UPDATE shards SET state = 'dead' WHERE state = 'dead'")
            dead = connection.execute(index.DEAD_SHARDS).fetchall()
        return self.remove_dead(dead)

    def plan(self, nbytes: int, *, namespace_id: int | None = None) -> EvictionReport:
        """What :meth:`free` would do, without doing it."""
        report = EvictionReport()
        with self._database.read() as connection:
            sizes = connection.execute(
                "SELECT s.id, s.uuid, s.nbytes, s.live_bytes FROM shards AS s WHERE state = 'live'"
            ).fetchall()
            left = {id_: [uuid, size, live] for id_, uuid, size, live in sizes}
            for block_id in _all_victims(connection, namespace_id):
                if report.freed_bytes >= nbytes:
                    break
                report.blocks += 1
                for shard_id, size in connection.execute(
                    "SELECT shard_id, sum(nbytes) FROM parts WHERE block_id = ? GROUP BY shard_id",
                    (block_id,),
                ):
                    report.nbytes += size
                    shard = left[shard_id]
                    shard[2] -= size
                    if shard[2] == 0:
                        report.freed_bytes += shard[1]
                        report.shards.append(shard[0])
        return report


def _victims(
    connection: Connection, protect: Collection[int], namespace_id: int | None
) -> Iterable[int]:
    """Evictable blocks, least valuable first; walks each chain towards its root while its blocks
    are worth no more than the next candidate. The caller evicts each before it asks for another."""
    counters = index.counters(connection)
    cold_first = counters["live_cold"] > counters["cold_target"]
    order = (COLD_VICTIMS, HOT_VICTIMS) if cold_first else (HOT_VICTIMS, COLD_VICTIMS)
    for statement in order:
        queue = "cold" if statement is COLD_VICTIMS else "hot"
        batch = connection.execute(statement, (VICTIM_BATCH + len(protect),)).fetchall()
        worth = batch[-1][1] if batch else 0
        for id_, _ in batch:
            current: int | None = id_
            for _ in range(MAX_CHAIN_WALK):
                if current is None or current in protect:
                    break
                if namespace_id is not None and not _in_namespace(
                    connection, current, namespace_id
                ):
                    break
                yield current
                current = _evictable_parent(connection, current, queue, worth)
        if batch:
            return


def _evictable_parent(connection: Connection, block_id: int, queue: str, worth: int) -> int | None:
    row = connection.execute(PARENT, (block_id,)).fetchone()
    if row is None:
        return None
    id_, refs, state, parent_queue, last_access, prev_access = row
    key = last_access if queue == "cold" else prev_access
    if refs or state != "live" or parent_queue != queue or key > worth:
        return None
    return int(id_)


def _in_namespace(connection: Connection, block_id: int, namespace_id: int) -> bool:
    row = connection.execute("SELECT namespace_id FROM blocks WHERE id = ?", (block_id,)).fetchone()
    return bool(row and row[0] == namespace_id)


def _all_victims(connection: Connection, namespace_id: int | None) -> Iterable[int]:
    """Evictable blocks in about the order of eviction, children before parents, for a plan."""
    held = "WHERE state = 'live' AND (?1 IS NULL OR namespace_id = ?1) ORDER BY "
    for row in connection.execute(
        "WITH RECURSIVE kept (id) AS ("
        "SELECT tip_id FROM sequences WHERE tip_id IS NOT NULL UNION "
        "SELECT b.parent_id FROM kept JOIN blocks AS b ON b.id = kept.id "
        "WHERE b.parent_id IS NOT NULL) "
        f"SELECT id FROM blocks {held} queue, last_access, depth DESC",
        (namespace_id,),
    ):
        yield row[0]
