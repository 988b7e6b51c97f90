"""The schema as an API: what is in the live schema, joined with what ``schema.toml`` says of it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kvdb.driver import Connection

# SQLite's own tables, and those of the tool that applies migrations.
NOT_OURS = ("sqlite_", "_sqlite_")
TABLES = "SELECT name, type FROM sqlite_schema WHERE type IN ('table', 'view') ORDER BY rowid"


@dataclass(frozen=True, slots=True)
class Column:
    """A column, or a documented key of a table of keys and values. ``type`` is empty for what a
    view computes and ``schema.toml`` does not know; ``nullable`` only says something of tables."""

    name: str
    type: str
    nullable: bool
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table or view. ``speed`` is what takes long on a large store; ``keys`` are the rows that a
    table of keys and values may have. Texts are empty where nothing is described."""

    name: str
    kind: str
    meaning: str
    speed: str
    columns: tuple[Column, ...]
    keys: tuple[Column, ...]


def describe(connection: Connection) -> list[Table]:
    """Every table, then every view, in the order they were made."""
    described = descriptions()
    found = [
        (name, kind)
        for name, kind in connection.execute(TABLES).fetchall()
        if not name.startswith(NOT_OURS)
    ]
    tables = [_table(connection, name, kind, described) for name, kind in found]
    return sorted(tables, key=lambda table: table.kind)


def descriptions() -> dict[str, Any]:
    """``schema.toml`` as it is."""
    return tomllib.loads((resources.files("kvdb") / "schema.toml").read_text("utf-8"))


def _table(connection: Connection, name: str, kind: str, described: Mapping[str, Any]) -> Table:
    own = described.get(name, {})
    texts: dict[str, Any] = {}
    for source in reversed(own.get("of", ())):
        texts |= described[source]["columns"]
    texts |= own.get("columns", {})
    rows = connection.execute("SELECT * FROM pragma_table_info(?)", (name,)).fetchall()
    columns = tuple(
        _column(column, type_, kind == "table" and not (not_null or key), texts.get(column, ""))
        for _, column, type_, not_null, _, key in rows
    )
    keys = tuple(_column(key, "", False, text) for key, text in own.get("keys", {}).items())
    return Table(name, kind, own.get("meaning", ""), own.get("speed", ""), columns, keys)


def _column(name: str, type_: str, nullable: bool, text: str | Mapping[str, str]) -> Column:
    if isinstance(text, str):
        text = {"meaning": text}
    return Column(
        name, type_ or text.get("type", ""), nullable, text.get("unit", ""), text.get("meaning", "")
    )
