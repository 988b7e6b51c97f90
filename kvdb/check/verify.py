"""verify: hold the index against itself, against the shard files, and optionally every byte.

Safe beside other processes: each finding is looked at again under the writer's lock before it is
reported or repaired, so what changed meanwhile is no finding. Repair only ever drops state (a cache
may lose) or recomputes derived numbers; running it again changes nothing.
"""

from __future__ import annotations

import itertools
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdb import holding, index
from kvdb.driver import Connection
from kvdb.errors import IntegrityError, disk_error
from kvdb.identity import block_hash, decode_extra, encode_extra
from kvdb.layout import Layout
from kvdb.locks import is_dead
from kvdb.reader import Damaged, Location
from kvdb.shards import read_shard_content, shard_path

if TYPE_CHECKING:
    from kvdb.store import Store

# A file without a row may belong to a process that is about to write the row's state.
ORPHAN_GRACE_SECONDS = 3600.0
BATCH = 500
LEFTOVERS = ("tmp/*", "shards/??/*", "processes/*.lock", "index.rebuilding*", "index.backup.new*")

DERIVED_REFS = (
    "(SELECT count(*) FROM blocks AS c WHERE c.parent_id = b.id AND (c.state = 'live' OR "
    "c.refs > 0)) + (SELECT count(*) FROM sequences AS s WHERE s.tip_id = b.id)"
)
# Children mostly have higher ids than their parents, so one pass downwards settles most.
REFS = (
    f"SELECT b.id, b.refs, {DERIVED_REFS} FROM blocks AS b "  # noqa: S608 - a constant of ours
    "WHERE b.id < ? ORDER BY b.id DESC LIMIT ?"
)
SHARD_TOTALS = (
    "SELECT s.id, s.uuid, s.live_parts, s.live_bytes, count(p.part), coalesce(sum(p.nbytes), 0) "
    "FROM shards AS s LEFT JOIN parts AS p ON p.shard_id = s.id GROUP BY s.id "
    "HAVING s.live_parts <> count(p.part) OR s.live_bytes <> coalesce(sum(p.nbytes), 0)"
)
NAMESPACE_TOTALS = """
SELECT n.id, n.live_blocks, n.live_tokens, n.live_bytes,
    (SELECT count(*) FROM blocks AS b WHERE b.namespace_id = n.id AND b.state = 'live'),
    (SELECT coalesce(sum(token_count), 0) FROM blocks AS b
        WHERE b.namespace_id = n.id AND b.state = 'live'),
    (SELECT coalesce(sum(p.nbytes), 0) FROM shards AS s JOIN parts AS p ON p.shard_id = s.id
        WHERE s.namespace_id = n.id)
FROM namespaces AS n
"""
COUNTER_TOTALS = """
SELECT 'shard_bytes' AS name, coalesce(sum((nbytes + 4095) / 4096 * 4096), 0) AS value FROM shards
UNION ALL SELECT 'live_cold', count(*) FROM blocks WHERE state = 'live' AND queue = 'cold'
UNION ALL SELECT 'live_hot', count(*) FROM blocks WHERE state = 'live' AND queue = 'hot'
UNION ALL SELECT 'evicted_cold', count(*) FROM blocks WHERE state = 'evicted' AND queue = 'cold'
UNION ALL SELECT 'evicted_hot', count(*) FROM blocks WHERE state = 'evicted' AND queue = 'hot'
"""
UNREACHABLE = (
    "SELECT b.id FROM blocks AS b JOIN blocks AS p ON p.id = b.parent_id "
    "WHERE (b.state = 'live' OR b.refs > 0) AND NOT (p.state = 'live' OR p.refs > 0)"
)
LIVE_SHARDS = "SELECT id, uuid, nbytes FROM shards WHERE state = 'live' AND id >= ? ORDER BY id"
SAMPLED_SHARDS = (
    "SELECT id, uuid, nbytes FROM shards WHERE state = 'live' ORDER BY random() LIMIT ?"
)
SUBTREE = """
WITH RECURSIVE tree (id, depth) AS (
    SELECT id, depth FROM blocks WHERE id = ?
    UNION ALL
    SELECT b.id, b.depth FROM tree JOIN blocks AS b ON b.parent_id = tree.id
    WHERE b.state = 'live' OR b.refs > 0
)
SELECT id FROM tree ORDER BY depth
"""
# Repairs count anew inside their own transaction: what was seen before may have changed.
SET_REFS = f"UPDATE blocks AS b SET refs = {DERIVED_REFS} WHERE b.id = ?"  # noqa: S608
SET_SHARD = (
    "UPDATE shards AS s SET live_parts = (SELECT count(*) FROM parts WHERE shard_id = s.id), "
    "live_bytes = (SELECT coalesce(sum(nbytes), 0) FROM parts WHERE shard_id = s.id) "
    "WHERE s.id = ?"
)
SET_NAMESPACE = (
    "UPDATE namespaces AS n SET "
    "live_blocks = (SELECT count(*) FROM blocks WHERE namespace_id = n.id AND state = 'live'), "
    "live_tokens = (SELECT coalesce(sum(token_count), 0) FROM blocks "
    "WHERE namespace_id = n.id AND state = 'live'), "
    "live_bytes = (SELECT coalesce(sum(p.nbytes), 0) FROM shards AS s "
    "JOIN parts AS p ON p.shard_id = s.id WHERE s.namespace_id = n.id) WHERE n.id = ?"
)
SET_COUNTER = (
    f"INSERT INTO counters (name, value) SELECT name, value FROM ({COUNTER_TOTALS}) "  # noqa: S608
    "WHERE name = ? ON CONFLICT (name) DO UPDATE SET value = excluded.value"
)
HELD = """
SELECT b.id, b.hash, coalesce(p.hash, zeroblob(32)), n.fingerprint, n.layout, b.state,
    b.token_count, t.tokens, t.extra, b.origin
FROM blocks AS b JOIN namespaces AS n ON n.id = b.namespace_id
LEFT JOIN blocks AS p ON p.id = b.parent_id
LEFT JOIN block_tokens AS t ON t.block_id = b.id
WHERE b.id > ? AND (b.state = 'live' OR b.refs > 0) ORDER BY b.id LIMIT ?
"""
SHARD_PARTS = (
    "SELECT p.block_id, b.hash, p.part, s.uuid, p.offset, p.nbytes, p.raw_nbytes, p.codec, "
    "p.checksum FROM parts AS p JOIN blocks AS b ON b.id = p.block_id "
    "JOIN shards AS s ON s.id = p.shard_id WHERE p.shard_id = ? ORDER BY p.offset"
)


@dataclass(slots=True)
class Problem:
    """One finding: its kind (one word), where, what, and whether repair mended it."""

    kind: str
    where: str
    detail: str
    repaired: bool = False


@dataclass(slots=True)
class VerifyReport:
    """What was looked at and what was found. ``next_shard`` is where a run that was interrupted
    goes on."""

    problems: list[Problem] = field(default_factory=list)
    checked_blocks: int = 0
    checked_shards: int = 0
    checked_parts: int = 0
    checked_bytes: int = 0
    swept_files: int = 0
    next_shard: int = 0

    @property
    def ok(self) -> bool:
        """True when nothing is wrong (any more)."""
        return all(problem.repaired for problem in self.problems)


def verify_store(
    store: Store,
    *,
    data: bool,
    repair: bool,
    sample: int | None,
    start: int,
    report: VerifyReport,
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    """See :meth:`kvdb.store.Store.verify`. Raises IntegrityError when SQLite itself says that the
    index is damaged: only a rebuild helps then."""
    if repair:
        store.require_retention()
    run = _Verification(store, repair, report)
    run.check_sqlite()
    run.check_refs()
    run.check_blocks()
    run.check_shards(data, sample, start, progress)
    run.check_totals()
    try:
        run.check_orphans()
    except OSError as error:
        raise disk_error(store.path, error) from error
    return run.report


class _Verification:
    def __init__(self, store: Store, repair: bool, report: VerifyReport) -> None:
        self._store = store
        self._database = store.database
        self._repair = repair
        self.report = report

    def _found(self, kind: str, where: str, detail: str, repaired: bool) -> None:
        self.report.problems.append(Problem(kind, where, detail, repaired))

    def check_sqlite(self) -> None:
        with self._database.read() as connection:
            rows = connection.execute("PRAGMA integrity_check(10)").fetchall()
            foreign = connection.execute("PRAGMA foreign_key_check").fetchall()
        if rows != [("ok",)]:
            raise IntegrityError(f"The index is damaged ({rows[0][0]}); run kvdb rebuild.")
        for table, rowid, parent, _ in foreign:
            self._found("foreign_key", f"{table} row {rowid}", f"names a missing {parent}", False)

    # -- blocks ------------------------------------------------------------------------------

    def check_blocks(self) -> None:
        """Held blocks have tokens that give their hash, a held parent, and their required parts."""
        last = 0
        while True:
            with self._database.read() as connection:
                rows = connection.execute(HELD, (last, BATCH)).fetchall()
                wrong = [(row[0], self._block_fault(connection, row)) for row in rows]
            if not rows:
                break
            last = rows[-1][0]
            self.report.checked_blocks += len(rows)
            for block_id, fault in wrong:
                if fault is not None:
                    self._bad_block(block_id, fault)
        with self._database.read() as connection:
            stray = [row[0] for row in connection.execute(UNREACHABLE).fetchall()]
        for block_id in stray:
            if self._repair:
                self._drop_subtree(block_id, "unreachable")
            self._found("unreachable", f"block {block_id}", "its parent is not held", self._repair)

    def _block_fault(self, connection: Connection, row: tuple[Any, ...]) -> str | None:
        _, hash_, parent, fingerprint, layout, state, count, tokens, extra, origin = row
        if tokens is None:
            return "tokens are gone"
        ids = index.tokens_from_blob(tokens)
        derived = block_hash(fingerprint, parent, ids, decode_extra(extra))
        withheld = origin == "import" and not tokens
        if not withheld and (len(ids) != count or derived != hash_):
            return "hash does not follow from its tokens"
        if state == "live":
            have = {part for part, *_ in connection.execute(index.BLOCK_PARTS, (row[0],))}
            missing = set(Layout.from_json(layout).required) - have
            if missing:
                return f"live without {', '.join(sorted(missing))}"
        return None

    def _bad_block(self, block_id: int, fault: str) -> None:
        with self._database.read() as connection:
            rows = connection.execute(HELD, (block_id - 1, 1)).fetchall()
            again = rows and rows[0][0] == block_id and self._block_fault(connection, rows[0])
        if not again:
            return
        where = f"block {block_id}"
        if not self._repair:
            self._found("block", where, fault, False)
        elif self._restore_tokens(block_id):
            self._found("block", where, f"{fault}; read again from its shard", True)
        else:
            dropped = self._drop_subtree(block_id, fault)
            self._found(
                "block", where, f"{fault}; dropped with {dropped - 1} that stand on it", True
            )

    def _restore_tokens(self, block_id: int) -> bool:
        """Shards hold tokens too: put them back if that mends the block."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT DISTINCT s.uuid FROM parts AS p JOIN shards AS s ON s.id = p.shard_id "
                "WHERE p.block_id = ?",
                (block_id,),
            ).fetchall()
            (hash_,) = connection.execute(
                "SELECT hash FROM blocks WHERE id = ?", (block_id,)
            ).fetchone()
        for (uuid,) in rows:
            try:
                content = read_shard_content(shard_path(self._store.path, uuid))
            except (OSError, IntegrityError):
                continue
            for block in content.blocks:
                if block.hash == hash_:
                    with self._database.write() as connection:
                        connection.execute(
                            index.INSERT_TOKENS,
                            (block_id, block.tokens.tobytes(), encode_extra(block.extra)),
                        )
                        row = connection.execute(HELD, (block_id - 1, 1)).fetchone()
                        return self._block_fault(connection, row) is None
        return False

    def _drop_subtree(self, block_id: int, detail: str) -> int:
        """Drop a block that nothing can vouch for, and all that stand on it. Sequences that held
        any of them fall back to its parent. Returns the number of blocks dropped."""
        now = self._store.environment.now_us()
        with self._database.write() as connection:
            ids = [row[0] for row in connection.execute(SUBTREE, (block_id,)).fetchall()]
            (parent_id,) = connection.execute(
                "SELECT parent_id FROM blocks WHERE id = ?", (block_id,)
            ).fetchone()
            emptied: list[int] = []
            for id_ in reversed(ids):  # children before parents
                holders = connection.execute(
                    "SELECT id FROM sequences WHERE tip_id = ?", (id_,)
                ).fetchall()
                for (sequence_id,) in holders:
                    connection.execute(holding.MOVE_SEQUENCE, (parent_id, sequence_id))
                    if parent_id is not None:
                        index.add_hold(connection, parent_id)
                    index.drop_hold(connection, id_)
                _, shards = index.evict_block(
                    connection, id_, now=now, reason="damaged", detail=detail
                )
                emptied += shards
            dead = index.kill_if_empty(connection, emptied)
        if dead:
            self._store.require_retention().sweep_dead()
        return len(ids)

    # -- shards ------------------------------------------------------------------------------

    def check_shards(
        self,
        data: bool,
        sample: int | None,
        start: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        with self._database.read() as connection:
            shards = connection.execute(
                LIVE_SHARDS if sample is None else SAMPLED_SHARDS,
                (start if sample is None else sample,),
            ).fetchall()
        for done, (shard_id, uuid, nbytes) in enumerate(shards):
            if progress is not None:
                progress(done, len(shards))
            self.report.next_shard = shard_id
            fault = self._shard_fault(uuid, nbytes)
            self.report.checked_shards += 1
            with self._database.read() as connection:
                rows = connection.execute(SHARD_PARTS, (shard_id,)).fetchall()
            # A shard that describes itself wrongly may still hold its parts: they are read.
            read = data or sample is not None or fault is not None
            whole = 0
            for location in itertools.starmap(Location, rows):
                self.report.checked_parts += 1
                whole += self._check_part(location, nbytes, read)
            if fault is not None and whole:
                repaired = self._repair and self._store.rewrite_shard(shard_id)
                self._found("shard", uuid, str(fault), repaired)
        if progress is not None:
            progress(len(shards), len(shards))

    def _shard_fault(self, uuid: str, nbytes: int) -> Damaged | None:
        try:
            content = read_shard_content(shard_path(self._store.path, uuid))
        except OSError as error:
            return Damaged.by(error)
        except IntegrityError as error:
            return Damaged(f"header: {error}")
        if content.nbytes != nbytes:
            return Damaged(f"shard has {content.nbytes} bytes instead of {nbytes}")
        return None

    def _check_part(self, location: Location, nbytes: int, read: bool) -> bool:
        """True when nothing is wrong with a part."""
        found: Damaged | None = None
        if location.offset + location.nbytes > nbytes:
            found = Damaged("part reaches beyond its shard")
        elif read:
            try:
                self._store.reader.read_fresh(location)
                self.report.checked_bytes += location.nbytes
            except Damaged as damage:
                found = damage
        if found is None:
            return True
        where = f"part {location.part} of block {location.hash.hex()[:16]}"
        if self._repair and self._store.report_damage(location, found) is not None:
            return False  # it moved meanwhile, and is checked where it lies now
        still = self._still_there(location)
        if still or self._repair:
            self._found(found.reason, where, str(found), self._repair and not still)
        return False

    def _still_there(self, location: Location) -> bool:
        with self._database.read() as connection:
            row = connection.execute(
                index.PART_LOCATION, (location.block_id, location.part)
            ).fetchone()
        return row is not None and (row[0], row[1]) == (location.shard, location.offset)

    # -- derived numbers ---------------------------------------------------------------------

    def check_refs(self) -> None:
        """refs = held children + sequences whose tip it is; a repair goes on until it is stable."""
        while self._refs_pass() and self._repair:
            pass

    def _refs_pass(self) -> bool:
        found, last = False, 1 << 62
        while True:
            with self._database.read() as connection:
                rows = connection.execute(REFS, (last, BATCH)).fetchall()
            if not rows:
                return found
            for block_id, refs, derived in rows:
                if refs != derived:
                    found = True
                    repaired = self._mend(SET_REFS, block_id)
                    detail = f"{refs} instead of {derived}"
                    self._found("refs", f"block {block_id}", detail, repaired)
            last = rows[-1][0]

    def check_totals(self) -> None:
        """Kept totals of shards and namespaces, and counters, are those of the rows."""
        with self._database.read() as connection:
            shards = connection.execute(SHARD_TOTALS).fetchall()
            namespaces = connection.execute(NAMESPACE_TOTALS).fetchall()
            kept = dict(connection.execute(index.ALL_COUNTERS).fetchall())
            counters = connection.execute(COUNTER_TOTALS).fetchall()
        for id_, uuid, _, _, parts, nbytes in shards:
            detail = f"has {parts} parts of {nbytes} bytes"
            self._found("totals", f"shard {uuid}", detail, self._mend(SET_SHARD, id_))
        for id_, *totals in namespaces:
            if totals[:3] != totals[3:]:
                detail = f"has {totals[3]} blocks of {totals[5]} bytes"
                self._found("totals", f"namespace {id_}", detail, self._mend(SET_NAMESPACE, id_))
        for name, value in counters:
            if kept.get(name) != value:
                detail = f"should be {value}"
                self._found("totals", f"counter {name}", detail, self._mend(SET_COUNTER, name))

    def _mend(self, statement: str, key: object) -> bool:
        if not self._repair:
            return False
        with self._database.write() as connection:
            connection.execute(statement, (key,))
        return True

    # -- files without rows ------------------------------------------------------------------

    def check_orphans(self) -> None:
        """What crashes may leave that no row names, older than the grace period."""
        with self._database.read() as connection:
            known = {row[0] for row in connection.execute("SELECT uuid FROM shards")}
            known |= {row[0] for row in connection.execute("SELECT uuid FROM processes")}
        now = time.time()
        for path in _crash_leftovers(self._store.path):
            try:
                status = path.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(status.st_mode):
                continue
            if path.stem in known or now - status.st_mtime < ORPHAN_GRACE_SECONDS:
                continue
            if path.suffix == ".lock" and not is_dead(path):
                continue  # a process that is about to write its row
            if self._repair:
                self._store.fs.unlink(path)
                self.report.swept_files += 1
            self._found(
                "orphan", path.name, f"{status.st_size} bytes that no row names", self._repair
            )


def _crash_leftovers(root: Path) -> Iterator[Path]:
    """Files that a crash may have left, if no row names them: payload, locks of processes that
    died before their row was written, a half-built index (rebuild works alone), half a backup."""
    for pattern in LEFTOVERS:
        yield from root.glob(pattern)
