"""The live schema, for completion and ``.schema``: read through the store's own connection, since
ad-hoc SQL may not ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvdb.store import Store

COLUMNS = """
    SELECT m.name, m.type, c.name
    FROM sqlite_schema AS m JOIN pragma_table_xinfo(m.name) AS c
    WHERE m.type IN ('table', 'view') AND m.name NOT LIKE 'sqlite%'
    ORDER BY m.type DESC, m.name, c.cid
"""


@dataclass(frozen=True, slots=True)
class Schema:
    """Tables and views by name, each with its columns in order."""

    columns: Mapping[str, tuple[str, ...]]
    views: frozenset[str]


def read_schema(store: Store) -> Schema:
    """The schema as it is now."""
    with store.database.read() as connection:
        rows = connection.execute(COLUMNS).fetchall()
    columns: dict[str, tuple[str, ...]] = {}
    for table, _, column in rows:
        columns[table] = (*columns.get(table, ()), column)
    return Schema(columns, frozenset(table for table, kind, _ in rows if kind == "view"))
