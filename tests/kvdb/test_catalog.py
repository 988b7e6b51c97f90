"""The schema page is what the schema is, and describes all of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from kvdb import catalog
from kvdb.store import Store

DOCS = Path(__file__).parents[2] / "docs"


def make_schema() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_schema", DOCS / "make_schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_schema_page_is_current() -> None:
    page = make_schema().page()
    assert (DOCS / "schema.md").read_text("utf-8") == page, "run python docs/make_schema.py"


def test_everything_is_described_and_nothing_else(store: Store) -> None:
    with store.database.read() as connection:
        tables = {table.name: table for table in catalog.describe(connection)}
        rows = {
            "settings": {key for (key,) in connection.execute("SELECT key FROM settings")},
            "counters": {name for (name,) in connection.execute("SELECT name FROM counters")},
        }
    for table in tables.values():
        assert table.meaning, table.name
        for column in table.columns:
            assert column.meaning, f"{table.name}.{column.name}"
            assert column.type, f"{table.name}.{column.name}"
    described = catalog.descriptions()
    assert set(described) == set(tables)
    for name, text in described.items():
        columns = {column.name for column in tables[name].columns}
        assert set(text["columns"]) <= columns, name
    for name, keys in rows.items():
        assert keys <= {key.name for key in tables[name].keys}, name
