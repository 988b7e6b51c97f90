"""Make docs/schema.md of the migrations and kvdb/schema.toml.

python docs/make_schema.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvdb.catalog import Column, Table, describe
from kvdb.driver import apply_migrations, latest_version, sqlite3

PAGE = Path(__file__).with_name("schema.md")
HEAD = """\
# The schema

*Made by `python docs/make_schema.py` from `migrations/` and `kvdb/schema.toml`; do not edit.*

The index of a store, `index.sqlite`, is an SQLite file in WAL mode, and its tables and views are
public: this page is schema {version}. Migrations add to it. Read it with `kvdb query`, `kvdb ls`,
`sqlite3`, sqlite-utils or Datasette, also while an engine runs; SQLite 3.37 or newer is enough.
Views use built-in functions only. Change nothing but `settings`, and rows of `requests` and
`evictions` that are to go.

```sh
sqlite3 -readonly ~/.local/share/kvdb/store/index.sqlite 'SELECT * FROM savings'
sqlite-utils query ~/.local/share/kvdb/store/index.sqlite 'SELECT * FROM tenant_usage' --table
datasette serve ~/.local/share/kvdb/store/index.sqlite
```

(DuckDB reads SQLite files through its `sqlite` extension, which it downloads at run time; that is
not part of kvdb's tests.)

Times named `*_at` are Unix microseconds in UTC. Hashes are blobs in tables and hex text in views.
A row id that another table's column names is written `table.column`.

A program that reads should keep its transactions short: while one lasts, the WAL cannot start anew,
and beyond 16 MiB of it history, then storing, pauses.

**Speed.** On a store of 1,000,000 blocks and 100,000 requests every view gives its first 1,000 rows
in less than 200 ms (`python -m tests.bench.views`), from kept totals and indexes. What takes longer
is said at the view.
"""


def page() -> str:
    """The page as it should be."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        apply_migrations(connection)
        tables = describe(connection)
    finally:
        connection.close()
    lines = [HEAD.format(version=latest_version())]
    for kind, title in (("table", "Tables"), ("view", "Views")):
        chosen = [table for table in tables if table.kind == kind]
        links = ", ".join(f"[{table.name}](#{table.name})" for table in chosen)
        lines += [f"## {title}", "", links, ""]
        for table in chosen:
            lines += _section(table)
    return "\n".join(lines)


def _section(table: Table) -> Iterator[str]:
    yield from (f"### {table.name}", "", _text(table.meaning), "")
    if table.speed:
        yield from (f"*Slow:* {table.speed}", "")
    yield from _rows(("column", "type", "unit", "meaning"), table.columns)
    if table.keys:
        yield from ("Its rows:", "")
        yield from _rows((table.columns[0].name, "type", "unit", "meaning"), table.keys)


def _rows(titles: Sequence[str], columns: Sequence[Column]) -> Iterator[str]:
    typed = any(column.type for column in columns)
    for cells in (titles, ["---"] * 4, *(_cells(column) for column in columns)):
        yield "| " + " | ".join(cell for n, cell in enumerate(cells) if typed or n != 1) + " |"
    yield ""


def _cells(column: Column) -> list[str]:
    kind = column.type + (" or NULL" if column.nullable else "")
    return [f"`{column.name}`", kind, column.unit, _text(column.meaning)]


def _text(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
