"""What stays and what goes: two queues with history, one learned ratio, and the hard limit.

A block seen once is *cold*, seen again it is *hot*. Both queues give their oldest leaf; the hot one
goes only when it is ``age_ratio`` times as old as the cold one. Evicted rows stay as history: a
block that comes back was cut too early, and the ratio moves by a step over its queue's history, so
that it rests where one more row of either queue would save as many hits.

Sources: promotion on the second reference and history that outlives the block are LRU-2's (O'Neil,
O'Neil and Weikum, SIGMOD 1993); two queues and the step over their history are ARC's (Megiddo and
Modha, FAST 2003), here with ages instead of sizes; resting at equal marginal hit rates follows LHD
(Beckmann, Chen and Cidon, NSDI 2018). At ratio 1 this is LRU.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from kvdb import holding, index
from kvdb.ballast import Ballast
from kvdb.clock import Environment
from kvdb.driver import Connection, Database, immediate
from kvdb.durable import FileSystem
from kvdb.history import trim_history
from kvdb.limit import Limit
from kvdb.reader import ShardReader
from kvdb.shards import shard_path

log = logging.getLogger("kvdb.retention")

ONE = 1 << 20  # age_ratio is fixed-point, so that it fits an INTEGER counter
RATIO_MIN = ONE  # from 1 on a parent, always at least as young as its child, never goes first
RATIO_MAX = 256 * ONE
STEP_UP = 3  # a hit in hot history, over the number of hot history rows
STEP_DOWN = 2  # a hit in cold history; smaller, since a wrong low ratio costs more hits
STEP_CAP = 5  # one hit moves the ratio by at most a fifth
HISTORY_FLOOR = 16  # a history shorter than live / 16 counts as that long
COLD_FLOOR = 32  # cold keeps live / 32, or a loop over hot blocks lets no newcomer stay
NEAR = 3  # hot history over three times as old as the oldest hot leaf is out of reach: no step
HISTORY = 2  # history rows per live row, at most
TOUCH_WINDOW_TICKS = 1  # one request is one tick: its references count once
VICTIM_BATCH = 64
GIVE_BACK_PAGES = "PRAGMA incremental_vacuum(256)"
FORGET_BATCH = 256

TOUCH = (
    "UPDATE blocks SET last_access = ?1, hits = hits + 1, "
    "queue = iif(?1 - prev_access >= ?3, 'hot', queue), "
    "prev_access = iif(?1 - prev_access >= ?3, ?1, prev_access) WHERE id = ?2"
)
OLDEST = {
    ("live", "cold"): (
        "SELECT id, last_access FROM blocks INDEXED BY blocks_victims_cold "
        "WHERE refs = 0 AND state = 'live' AND queue = 'cold' "
        "ORDER BY last_access, depth DESC LIMIT ?"
    ),
    ("live", "hot"): (
        "SELECT id, last_access FROM blocks INDEXED BY blocks_victims_hot "
        "WHERE refs = 0 AND state = 'live' AND queue = 'hot' "
        "ORDER BY last_access, depth DESC LIMIT ?"
    ),
    ("evicted", "cold"): (
        "SELECT id, last_access FROM blocks INDEXED BY blocks_history_cold "
        "WHERE refs = 0 AND state = 'evicted' AND queue = 'cold' "
        "ORDER BY last_access, depth DESC LIMIT ?"
    ),
    ("evicted", "hot"): (
        "SELECT id, last_access FROM blocks INDEXED BY blocks_history_hot "
        "WHERE refs = 0 AND state = 'evicted' AND queue = 'hot' "
        "ORDER BY last_access, depth DESC LIMIT ?"
    ),
}
OLDEST_OF_NAMESPACE = (
    "SELECT id, last_access FROM blocks WHERE refs = 0 AND state = 'live' "
    "AND namespace_id IN (SELECT value FROM json_each(?)) "
    "ORDER BY queue = 'hot', last_access, depth DESC LIMIT ?"
)
SET_RATIO = "UPDATE counters SET value = ? WHERE name = 'age_ratio'"
FORGET = (
    "DELETE FROM blocks WHERE id = ? AND NOT EXISTS "
    "(SELECT 1 FROM blocks AS c WHERE c.parent_id = blocks.id)"
)


@dataclass(slots=True)
class EvictionReport:
    """What an eviction did: whole blocks, their stored bytes, and bytes given back to the disk."""

    blocks: int = 0
    nbytes: int = 0
    freed_bytes: int = 0
    shards: list[str] = field(default_factory=list)


def touch(connection: Connection, block_ids: Iterable[int], tick: int) -> None:
    """Count one reference to each block, all in one tick."""
    connection.executemany(TOUCH, [(tick, id_, TOUCH_WINDOW_TICKS) for id_ in block_ids])


def readmit(connection: Connection, row: index.BlockRow, tick: int) -> None:
    """A block that history remembers is about to be live again: learn from it, and touch it."""
    learn(connection, row, tick)
    touch(connection, [row.id], tick)


def learn(connection: Connection, row: index.BlockRow, tick: int) -> None:
    """A remembered block was asked for: the ratio goes up if a hot one was cut short, down if a
    cold one was."""
    counters = index.counters(connection)
    live = counters["live_cold"] + counters["live_hot"]
    if row.queue == "hot":
        if counters["live_cold"] * COLD_FLOOR <= live:
            return
        oldest = connection.execute(OLDEST["live", "hot"], (1,)).fetchone()
        if oldest is not None and tick - row.last_access > NEAR * (tick - oldest[1]):
            return
    rows = max(counters[f"evicted_{row.queue}"], live // HISTORY_FLOOR, 1)
    ratio = counters["age_ratio"]
    step = STEP_UP if row.queue == "hot" else STEP_DOWN
    change = max(1, min(ratio * step // rows, ratio // STEP_CAP))
    ratio += change if row.queue == "hot" else -change
    connection.execute(SET_RATIO, (min(max(ratio, RATIO_MIN), RATIO_MAX),))


def victims(
    connection: Connection,
    protect: Collection[int] = (),
    namespaces: Collection[int] | None = None,
) -> Iterable[int]:
    """Evictable blocks, least valuable first. The caller evicts each before it asks for the next,
    so a chain goes from its leaf to its root."""
    tick = index.counters(connection)["tick"]
    while True:
        if namespaces is None:
            victim = _older(connection, "live", tick, protect)
            batch = [] if victim is None else [victim]
        else:
            # No index leads here: one scan serves a batch of leaves.
            rows = connection.execute(
                OLDEST_OF_NAMESPACE, (json.dumps(list(namespaces)), VICTIM_BATCH + len(protect))
            ).fetchall()
            batch = [id_ for id_, _ in rows if id_ not in protect]
        if not batch:
            return
        yield from batch


def _older(
    connection: Connection, state: str, tick: int, protect: Collection[int] = (), power: int = 1
) -> int | None:
    """The worse of the oldest cold and the oldest hot leaf: hot goes when (its age / the cold
    one's age) ** power exceeds the ratio."""
    oldest: dict[str, tuple[int, int]] = {}
    for queue in ("cold", "hot"):
        rows = connection.execute(OLDEST[state, queue], (1 + len(protect),)).fetchall()
        row = next((row for row in rows if row[0] not in protect), None)
        if row is not None:
            oldest[queue] = row
    if len(oldest) < 2:
        return next((row[0] for row in oldest.values()), None)
    (cold, cold_access), (hot, hot_access) = oldest["cold"], oldest["hot"]
    counters = index.counters(connection)
    if state == "live" and cold_access:  # access 0: a tail that a longer block contains
        live = counters["live_cold"] + counters["live_hot"]
        if counters["live_cold"] * COLD_FLOOR <= live:
            return hot
    cold_age, hot_age = (tick - cold_access) ** power, (tick - hot_access) ** power
    return hot if hot_age * ONE > cold_age * counters["age_ratio"] else cold


def forget(connection: Connection) -> None:
    """Trim history to twice the live rows, oldest first, by the root of the ratio: else hot
    history would crowd out cold. At most a batch at a time."""
    counters = index.counters(connection)
    history = counters["evicted_cold"] + counters["evicted_hot"]
    live = counters["live_cold"] + counters["live_hot"]
    excess = min(history - HISTORY * max(live, VICTIM_BATCH), FORGET_BATCH)
    kept: set[int] = set()  # still the parent of some row
    while excess > 0 and len(kept) < VICTIM_BATCH:
        row = _older(connection, "evicted", counters["tick"], kept, power=2)
        if row is None:
            return
        if connection.execute(FORGET, (row,)).rowcount:
            excess -= 1
        else:
            kept.add(row)


class Retention:
    """Evicts blocks and gives their shards' bytes back. Safe to run in several processes."""

    def __init__(
        self,
        database: Database,
        limit: Limit,
        reader: ShardReader,
        fs: FileSystem,
        environment: Environment,
        ballast: Ballast,
        settle: Callable[[], int],
    ) -> None:
        self._settle = settle
        self._ballast = ballast
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
        namespaces: Collection[int] | None = None,
        compact: Callable[[], int] | None = None,
        live: bool = False,
        progress: Callable[[EvictionReport], None] | None = None,
    ) -> EvictionReport:
        """Evict least valuable blocks until ``nbytes`` are given back or nothing can go.

        Leaves go before their parents, so what remains are usable prefixes. ``protect`` are block
        ids that stay. Where held blocks keep shards alive between evicted ones, ``compact`` is
        asked for their bytes before more blocks go; with ``live`` it is the blocks' own bytes that
        count, not the disk's. When nothing can go, what dead processes hold
        is released first. Works in short transactions; may be interrupted at any point.
        """
        report = EvictionReport()
        settled = False
        compacted_at = 0
        while (report.nbytes if live else report.freed_bytes) < nbytes:
            if compact is not None and report.nbytes - compacted_at >= nbytes:
                compacted_at = report.nbytes
                report.freed_bytes += compact()
                continue
            missing = nbytes - (report.nbytes if live else report.freed_bytes)
            batch, dead = self._ballast.spend(
                lambda missing=missing: self._commit_batch(
                    missing, reason, protect, namespaces, live
                )  # type: ignore[misc]
            )
            if batch.blocks == 0:
                if not settled and self._settle():
                    settled = True
                elif compact is not None and report.nbytes > compacted_at:
                    compacted_at = report.nbytes
                    report.freed_bytes += compact()
                else:
                    break
                continue
            _add(report, batch)
            self._ballast.spend(lambda dead=dead: self.remove_dead(dead))  # type: ignore[misc]
            if progress is not None:
                progress(report)
        self._ballast.ensure()
        return report

    def _commit_batch(
        self,
        nbytes: int,
        reason: str,
        protect: Collection[int],
        namespaces: Collection[int] | None,
        live: bool,
    ) -> tuple[EvictionReport, list[tuple[int, str, int]]]:
        with self._database.write(durable=True) as connection:
            return self._evict_batch(connection, nbytes, reason, protect, namespaces, live)

    def plan(self, nbytes: int, *, namespaces: Collection[int] | None = None) -> EvictionReport:
        """What :meth:`free` would do: it runs on a copy of the index in memory."""
        report = EvictionReport()
        copy = self._database.memory_copy()
        try:
            while report.freed_bytes < nbytes:
                with immediate(copy):
                    batch, _ = self._evict_batch(
                        copy, nbytes - report.freed_bytes, "manual", (), namespaces
                    )
                if batch.blocks == 0:
                    break
                _add(report, batch)
        finally:
            copy.close()
        return report

    def _evict_batch(
        self,
        connection: Connection,
        nbytes: int,
        reason: str,
        protect: Collection[int],
        namespaces: Collection[int] | None,
        live: bool = False,
    ) -> tuple[EvictionReport, list[tuple[int, str, int]]]:
        now = self._environment.now_us()
        report = EvictionReport()
        dead: list[tuple[int, str, int]] = []
        holding.drop_expired(connection, now)
        for block_id in victims(connection, protect, namespaces):
            size, shards = index.evict_block(connection, block_id, now=now, reason=reason)
            report.blocks += 1
            report.nbytes += size
            for shard in index.kill_if_empty(connection, shards):
                dead.append(shard)
                report.freed_bytes += shard[2]
                report.shards.append(shard[1])
            done = report.nbytes if live else report.freed_bytes
            if report.blocks >= VICTIM_BATCH or done >= nbytes:
                break
        forget(connection)
        trim_history(connection, self._limit.history_rows)
        connection.execute(GIVE_BACK_PAGES).fetchall()
        return report, dead

    def sweep_dead(self) -> int:
        """Finish every removal that some process began. Returns the bytes given back."""
        with self._database.write(durable=True) as connection:
            # The write makes this commit sync the WAL, and with it the commit that killed them.
            connection.execute("UPDATE shards SET state = 'dead' WHERE state = 'dead'")
            dead = connection.execute(index.DEAD_SHARDS).fetchall()
        return self.remove_dead(dead)

    def remove_dead(self, dead: Collection[tuple[int, str, int]]) -> int:
        """Unlink dead shards whose rows are durably dead, then delete the rows. Returns bytes."""
        gone: list[tuple[int]] = []
        freed = 0
        for id_, uuid, nbytes in dead:
            self._reader.forget(uuid)
            try:
                self._fs.unlink(shard_path(self._limit.root, uuid))
            except OSError as error:
                log.warning("a dead shard stays for now: %s", error.strerror)
                continue  # its row stays dead: the next sweep tries again
            gone.append((id_,))
            freed += nbytes
        if gone:
            with self._database.write() as connection:
                connection.executemany(index.DELETE_DEAD, gone)
        return freed


def _add(report: EvictionReport, batch: EvictionReport) -> None:
    report.blocks += batch.blocks
    report.nbytes += batch.nbytes
    report.freed_bytes += batch.freed_bytes
    report.shards += batch.shards
