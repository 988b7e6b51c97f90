"""Makes blocks of a published shard visible: their rows, parents first, in the caller's write
transaction. Puts and imports end here, so that both follow the same rules."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvdb import index, retention
from kvdb.driver import Connection
from kvdb.identity import ROOT_PARENT, encode_extra
from kvdb.layout import Layout
from kvdb.shards import ShardBlock


@dataclass(frozen=True, slots=True)
class Incoming:
    """What a block is that some parts are stored of."""

    namespace_id: int
    layout: Layout
    hash: bytes
    parent: bytes
    depth: int
    origin: str
    exact: bool
    build_id: int | None


def missing_parts(connection: Connection, block: Incoming, names: Collection[str]) -> list[str]:
    """Which of these parts the store lacks, or must replace by exact ones."""
    row = index.find_block(connection, block.hash)
    if row is None or _replaces(connection, block, row):
        return list(names)
    if not _may_mix(connection, block, row):
        return []
    have = {part for part, *_ in connection.execute(index.BLOCK_PARTS, (row.id,))}
    return [name for name in names if name not in have]


def _replaces(connection: Connection, block: Incoming, row: index.BlockRow) -> bool:
    """An exact block replaces its inexact twin, or one of another build. A build that is not
    compatible replaces nothing of others, and any that is replaces it: parts of the two in one
    block would pass for the wrong one's."""
    if row.state != "live":
        return False
    if row.build_id != block.build_id:
        if _verdict(connection, block.build_id) != "compatible":
            return False
        if _verdict(connection, row.build_id) != "compatible":
            return True
    return block.exact and not (row.exact and row.build_id == block.build_id)


def _may_mix(connection: Connection, block: Incoming, row: index.BlockRow) -> bool:
    """Whether parts may be added to a live block that is not replaced. Inexact logits under an
    exact row would be sampled from in exact mode, and those of a build that was not compared would
    pass for the row's."""
    if row.state != "live":
        return True
    same = row.build_id == block.build_id
    trusted = same or _verdict(connection, block.build_id) == "compatible"
    return trusted and block.exact >= row.exact


def _verdict(connection: Connection, build_id: int | None) -> str:
    """Of a build; one that is not known is unchecked, and none is not to be checked."""
    if build_id is None:
        return "compatible"
    row = connection.execute("SELECT verdict FROM builds WHERE id = ?", (build_id,)).fetchone()
    return "unchecked" if row is None else str(row[0])


class Visible:
    """See the module. ``emptied`` are shards that lost parts to twins that replaced them."""

    def __init__(self, connection: Connection, now: int) -> None:
        self._connection = connection
        self._now = now
        self._tick = index.next_tick(connection)
        self.emptied: list[int] = []

    def insert(
        self, incoming: Incoming, shard_id: int | None, block: ShardBlock | None
    ) -> tuple[int, bool] | None:
        """(block id, whether anything was stored), or None when the block cannot stand. ``block``
        is what the shard holds of it; None when that is nothing."""
        connection = self._connection
        parent_id: int | None = None
        if incoming.parent != ROOT_PARENT:
            parent = index.find_block(connection, incoming.parent)
            if parent is None or not parent.held:
                return None
            parent_id = parent.id
        row = index.find_block(connection, incoming.hash)
        names = {part.part for part in block.parts} if block is not None else set()
        whole = names.issuperset(incoming.layout.required)
        if row is not None and row.state == "live":
            replaces = _replaces(connection, incoming, row)
            if not whole if replaces else not _may_mix(connection, incoming, row):
                return row.id, False
            if block is not None and replaces:
                self.emptied += [s for (s,) in connection.execute(index.BLOCK_SHARDS, (row.id,))]
                connection.execute(index.DELETE_PARTS, (row.id,))
                connection.execute(
                    "UPDATE blocks SET exact = ?, build_id = ?, origin = ? WHERE id = ?",
                    (int(incoming.exact), incoming.build_id, incoming.origin, row.id),
                )
            return row.id, self._insert_parts(row.id, shard_id, block)
        if block is None or not whole:
            return None
        block_id = self._insert_block(incoming, row, parent_id, block)
        self._insert_parts(block_id, shard_id, block)
        return block_id, True

    def _insert_block(
        self,
        incoming: Incoming,
        row: index.BlockRow | None,
        parent_id: int | None,
        block: ShardBlock,
    ) -> int:
        connection = self._connection
        tokens, extra = block.tokens.tobytes(), encode_extra(block.extra)
        if row is None:
            block_id = index.insert_block(
                connection,
                hash_=incoming.hash,
                parent_id=parent_id,
                namespace_id=incoming.namespace_id,
                depth=incoming.depth,
                token_count=block.token_count,
                origin=incoming.origin,
                exact=incoming.exact,
                build_id=incoming.build_id,
                now=self._now,
                tick=self._tick,
                tokens=tokens,
                extra=extra,
            )
        else:
            block_id = row.id
            retention.readmit(connection, row, self._tick)
            index.revive_block(connection, row, tokens, extra)
            connection.execute(
                "UPDATE blocks SET origin = ?, exact = ?, build_id = ?, created_at = ? "
                "WHERE id = ?",
                (incoming.origin, int(incoming.exact), incoming.build_id, self._now, block_id),
            )
        index.supersede_tails(
            connection,
            parent_id=parent_id,
            namespace_id=incoming.namespace_id,
            token_count=block.token_count,
            tokens=tokens,
        )
        return block_id

    def _insert_parts(self, block_id: int, shard_id: int | None, block: ShardBlock | None) -> bool:
        if block is None or shard_id is None:
            return False
        connection = self._connection
        have = {part for part, *_ in connection.execute(index.BLOCK_PARTS, (block_id,))}
        rows = [
            (block_id, p.part, shard_id, p.offset, p.nbytes, p.raw_nbytes, p.codec, p.checksum)
            for p in block.parts
            if p.part not in have
        ]
        index.insert_parts(connection, rows)
        return bool(rows)
