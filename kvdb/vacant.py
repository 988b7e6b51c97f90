"""Namespaces that hold nothing: every salt and every setting makes a row, so old ones are dropped.

Runs inside the caller's write transaction. What a dropped namespace did stays in history's totals,
as of none. Ids are never used again: the newest row always stays.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from kvdb.driver import Connection

# Beyond so many rows, those without blocks go down to half of it.
MOST_NAMESPACES = 1000
# One opened this recently may yet be used by whoever opened it.
RECENT_US = 60_000_000

COUNT = "SELECT count(*) FROM namespaces"
# Another process that lives uses none that was last opened before it started.
VACANT = """
SELECT id FROM namespaces AS n
WHERE live_blocks = 0 AND id < (SELECT max(id) FROM namespaces)
    AND used_at < min(:before, coalesce(
        (SELECT min(started_at) FROM processes WHERE id IS NOT :process_id), :before))
    AND NOT EXISTS (SELECT 1 FROM blocks WHERE namespace_id = n.id)
    AND NOT EXISTS (SELECT 1 FROM shards WHERE namespace_id = n.id)
    AND NOT EXISTS (SELECT 1 FROM sequences WHERE namespace_id = n.id)
    AND id NOT IN (SELECT value FROM json_each(:used))
ORDER BY used_at LIMIT :count
"""
# Tables of totals: what else is in their key, and what is added up.
COMMON = ("requests", "full_skips", "prompt_tokens", "restored_tokens", "refilled_tokens")
COSTS = ("computed_tokens", "generated_tokens", "restore_ms")
READ = ("bytes_read", "bytes_ram", "bytes_remote", "timed_tokens", "timed_ms")
TOTALS = {
    "request_totals": (("tenant", "miss_reason"), (*COMMON, *COSTS, *READ)),
    "hourly_totals": (("hour_at", "tenant"), (*COMMON, *COSTS)),
    "eviction_totals": (("day_at", "reason"), ("evictions", "tokens", "nbytes")),
    "write_totals": (("day_at",), ("shards", "nbytes")),
}


def drop_vacant(
    connection: Connection, now: int, used: Collection[int], process_id: int | None
) -> list[int]:
    """Drop namespaces without blocks, the longest unused first, where there are too many. Those
    that this process may have in use are ``used``; it has the row ``process_id``. Returns their
    ids."""
    (count,) = connection.execute(COUNT).fetchone()
    if count <= MOST_NAMESPACES:
        return []
    found = connection.execute(
        VACANT,
        {
            "before": now - RECENT_US,
            "process_id": process_id,
            "used": json.dumps(sorted(used)),
            "count": count - MOST_NAMESPACES // 2,
        },
    )
    ids = [int(id_) for (id_,) in found.fetchall()]
    gone = (json.dumps(ids),)
    for table, (keys, sums) in TOTALS.items():
        for statement in _fold(table, keys, sums):
            connection.execute(statement, gone)
    of_gone = "namespace_id IN (SELECT value FROM json_each(?))"
    connection.execute(f"UPDATE requests SET namespace_id = NULL WHERE {of_gone}", gone)  # noqa: S608
    connection.execute("DELETE FROM namespaces WHERE id IN (SELECT value FROM json_each(?))", gone)
    return ids


def _fold(table: str, keys: Collection[str], sums: Collection[str]) -> tuple[str, str]:
    """Statements that add the totals of some namespaces to those of none."""
    of_gone = "namespace_id IN (SELECT value FROM json_each(?))"
    columns = ", ".join(("namespace_id", *keys, *sums))
    chosen = ", ".join(("0", *keys, *(f"sum({name})" for name in sums)))
    added = ", ".join(f"{name} = {name} + excluded.{name}" for name in sums)
    return (
        f"INSERT INTO {table} ({columns}) SELECT {chosen} FROM {table} WHERE {of_gone} "  # noqa: S608 - our own names
        f"GROUP BY {', '.join(keys)} ON CONFLICT DO UPDATE SET {added}",
        f"DELETE FROM {table} WHERE {of_gone}",  # noqa: S608
    )
