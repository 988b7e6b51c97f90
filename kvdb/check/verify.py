"""verify: hold the index against itself, against the shard files, and optionally every byte.

Safe beside other processes: each finding is looked at again under the writer's lock before it is
reported or repaired, so what changed meanwhile is no finding. Repair only ever drops state (a cache
may lose) or recomputes derived numbers; running it again changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdb import index
from kvdb.driver import Connection
from kvdb.errors import IntegrityError
from kvdb.identity import block_hash, decode_extra, encode_extra
from kvdb.layout import Layout
from kvdb.reader import Damaged, Location
from kvdb.shards import read_shard_content, shard_path

if TYPE_CHECKING:
    from kvdb.store import Store

# A file without a row may belong to a process that is about to write the row's state.
ORPHAN_GRACE_SECONDS = 3600.0
BATCH = 500

REFS = """
SELECT b.id, b.refs,
    (SELECT count(*) FROM blocks AS c WHERE c.parent_id = b.id AND (c.state = 'live' OR c.refs > 0))
    + (SELECT count(*) FROM sequences AS s WHERE s.tip_id = b.id) AS derived
FROM blocks AS b WHERE b.id > ? ORDER BY b.id LIMIT ?
"""
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
SELECT 'shard_bytes', coalesce(sum(nbytes), 0) FROM shards
UNION ALL SELECT 'live_cold', count(*) FROM blocks WHERE state = 'live' AND queue = 'cold'
UNION ALL SELECT 'live_hot', count(*) FROM blocks WHERE state = 'live' AND queue = 'hot'
UNION ALL SELECT 'evicted_cold', count(*) FROM blocks WHERE state = 'evicted' AND queue = 'cold'
UNION ALL SELECT 'evicted_hot', count(*) FROM blocks WHERE state = 'evicted' AND queue = 'hot'
"""
UNREACHABLE = (
    "SELECT b.id FROM blocks AS b JOIN blocks AS p ON p.id = b.parent_id "
    "WHERE (b.state = 'live' OR b.refs > 0) AND NOT (p.state = 'live' OR p.refs > 0)"
)
LIVE_SHARDS = "SELECT id, uuid, nbytes FROM shards WHERE state = 'live' ORDER BY id"
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
SET_REFS = "UPDATE blocks SET refs = ? WHERE id = ?"
SET_SHARD = "UPDATE shards SET live_parts = ?, live_bytes = ? WHERE id = ?"
SET_NAMESPACE = (
    "UPDATE namespaces SET live_blocks = ?, live_tokens = ?, live_bytes = ? WHERE id = ?"
)
SET_COUNTER = "UPDATE counters SET value = ? WHERE name = ?"
HELD = """
SELECT b.id, b.hash, coalesce(p.hash, zeroblob(32)), n.fingerprint, n.layout, b.state,
    b.token_count, t.tokens, t.extra
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
    """What was looked at and what was found."""

    problems: list[Problem] = field(default_factory=list)
    checked_blocks: int = 0
    checked_shards: int = 0
    checked_parts: int = 0
    checked_bytes: int = 0
    swept_files: int = 0

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
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    """See :meth:`kvdb.store.Store.verify`. Raises IntegrityError when SQLite itself says that the
    index is damaged: only a rebuild helps then."""
    if repair:
        store.require_retention()
    run = _Verification(store, repair)
    run.check_sqlite()
    run.check_blocks()
    run.check_shards(data, sample, progress)
    run.check_refs()
    run.check_totals()
    run.check_orphans()
    return run.report


class _Verification:
    def __init__(self, store: Store, repair: bool) -> None:
        self._store = store
        self._database = store.database
        self._repair = repair
        self.report = VerifyReport()

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
        _, hash_, parent, fingerprint, layout, state, count, tokens, extra = row
        if tokens is None:
            return "tokens are gone"
        ids = index.tokens_from_blob(tokens)
        derived = block_hash(fingerprint, parent, ids, decode_extra(extra))
        if len(ids) != count or derived != hash_:
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
            for id_ in reversed(ids):  # children before parents
                holders = connection.execute(
                    "SELECT id FROM sequences WHERE tip_id = ?", (id_,)
                ).fetchall()
                for (sequence_id,) in holders:
                    connection.execute(index.MOVE_SEQUENCE, (parent_id, sequence_id))
                    if parent_id is not None:
                        index.add_hold(connection, parent_id)
                    index.drop_hold(connection, id_)
                index.evict_block(connection, id_, now=now, reason="damaged", detail=detail)
        return len(ids)

    # -- shards ------------------------------------------------------------------------------

    def check_shards(
        self, data: bool, sample: int | None, progress: Callable[[int, int], None] | None
    ) -> None:
        with self._database.read() as connection:
            shards = connection.execute(
                LIVE_SHARDS if sample is None else SAMPLED_SHARDS,
                () if sample is None else (sample,),
            ).fetchall()
        for done, (shard_id, uuid, nbytes) in enumerate(shards):
            if progress is not None:
                progress(done, len(shards))
            fault = self._shard_fault(uuid, nbytes)
            self.report.checked_shards += 1
            with self._database.read() as connection:
                rows = connection.execute(SHARD_PARTS, (shard_id,)).fetchall()
            for location in map(Location._make, rows):
                self.report.checked_parts += 1
                self._check_part(location, nbytes, fault, data or sample is not None)
        if progress is not None:
            progress(len(shards), len(shards))

    def _shard_fault(self, uuid: str, nbytes: int) -> str | None:
        path = shard_path(self._store.path, uuid)
        try:
            content = read_shard_content(path)
        except OSError as error:
            return f"cannot be opened: {error.strerror}"
        except IntegrityError as error:
            return f"header: {error}"
        if content.nbytes != nbytes:
            return f"has {content.nbytes} bytes instead of {nbytes}"
        return None

    def _check_part(self, location: Location, nbytes: int, fault: str | None, data: bool) -> None:
        detail = None
        if fault is not None and not data:
            detail = fault
        elif location.offset + location.nbytes > nbytes:
            detail = "part reaches beyond its shard"
        elif data or fault is not None:
            try:
                self._store.reader.read_fresh(location)
                self.report.checked_bytes += location.nbytes
            except Damaged as damage:
                detail = str(damage)
        if detail is None:
            return
        where = f"part {location.part} of block {location.hash.hex()[:16]}"
        if self._repair:
            if self._store.report_damage(location, detail) is None:
                self._found("damaged", where, detail, True)
        elif self._still_there(location):
            self._found("damaged", where, detail, False)

    def _still_there(self, location: Location) -> bool:
        with self._database.read() as connection:
            row = connection.execute(
                index.PART_LOCATION, (location.block_id, location.part)
            ).fetchone()
        return row is not None and (row[0], row[1]) == (location.shard, location.offset)

    # -- derived numbers ---------------------------------------------------------------------

    def check_refs(self) -> None:
        """refs = held children + sequences whose tip it is."""
        last = 0
        while True:
            with self._database.read() as connection:
                rows = connection.execute(REFS, (last, BATCH)).fetchall()
            if not rows:
                return
            for block_id, refs, derived in rows:
                if refs != derived:
                    self._found(
                        "refs",
                        f"block {block_id}",
                        f"{refs} instead of {derived}",
                        self._set(SET_REFS, derived, block_id),
                    )
            last = rows[-1][0]

    def check_totals(self) -> None:
        with self._database.read() as connection:
            shards = connection.execute(SHARD_TOTALS).fetchall()
            namespaces = [
                row
                for row in connection.execute(NAMESPACE_TOTALS).fetchall()
                if tuple(row[1:4]) != tuple(row[4:7])
            ]
            counters = index.counters(connection)
            wrong = [
                (name, value)
                for name, value in connection.execute(COUNTER_TOTALS).fetchall()
                if counters.get(name) != value
            ]
        for id_, uuid, _, _, parts, nbytes in shards:
            self._found(
                "totals",
                f"shard {uuid}",
                f"has {parts} parts of {nbytes} bytes",
                self._set(SET_SHARD, parts, nbytes, id_),
            )
        for id_, *_, blocks, tokens, nbytes in namespaces:
            self._found(
                "totals",
                f"namespace {id_}",
                f"has {blocks} blocks of {nbytes} bytes",
                self._set(SET_NAMESPACE, blocks, tokens, nbytes, id_),
            )
        for name, value in wrong:
            self._found(
                "totals",
                f"counter {name}",
                f"should be {value}",
                self._set(SET_COUNTER, value, name),
            )

    def _set(self, sql: str, *values: object) -> bool:
        if not self._repair:
            return False
        with self._database.write() as connection:
            connection.execute(sql, values)
        return True

    # -- files without rows ------------------------------------------------------------------

    def check_orphans(self) -> None:
        """Files in ``shards/`` and ``tmp/`` that no row names, older than the grace period."""
        with self._database.read() as connection:
            known = {row[0] for row in connection.execute("SELECT uuid FROM shards")}
        now = time.time()
        for path in _payload_files(self._store.path):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if path.stem in known or now - status.st_mtime < ORPHAN_GRACE_SECONDS:
                continue
            if self._repair:
                self._store.fs.unlink(path)
                self.report.swept_files += 1
            self._found(
                "orphan", path.name, f"{status.st_size} bytes that no row names", self._repair
            )


def _payload_files(root: Path) -> Iterator[Path]:
    yield from (root / "tmp").glob("*")
    yield from (root / "shards").glob("??/*")
