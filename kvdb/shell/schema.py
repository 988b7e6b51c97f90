"""The live schema with what is known about it, for completion and ``.tables``: read through the
store's own connection, since ad-hoc SQL may not ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvdb.catalog import Table, describe
from kvdb.store import Store


@dataclass(frozen=True, slots=True)
class Schema:
    """Tables and views by name."""

    version: int
    tables: Mapping[str, Table]


class LiveSchema:
    """The schema as it is now; read again when it has changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: Schema | None = None

    def __call__(self) -> Schema:
        with self._store.database.read() as connection:
            (version,) = connection.execute("PRAGMA schema_version").fetchone()
            if self._known is None or self._known.version != version:
                tables = {table.name: table for table in describe(connection)}
                self._known = Schema(version, tables)
        return self._known
