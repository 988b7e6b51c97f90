"""What shards do not hold (names, history, settings, keys, responses), from an old index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvdb import driver, holding, index
from kvdb.answers import INSERT_ANSWER
from kvdb.backup import BACKUP_NAME
from kvdb.driver import Connection, Database
from kvdb.errors import IntegrityError, KvdbError, OutOfSpace, StoreTooNew
from kvdb.limit import MIN_MAX_BYTES
from kvdb.opening import DEFAULT_SETTINGS

ROWS_PER_TRANSACTION = 500


def recover_rest(database: Database, root: Path) -> tuple[int, list[str]]:
    """Sequences, history, settings, keys and ticks from the old index, else from its backup.
    Returns the number of named sequences recovered, and what is lost in words."""
    with database.read() as connection:
        own_columns = {row[1] for row in connection.execute("PRAGMA table_info(requests)")}
    for name in (driver.INDEX_NAME, BACKUP_NAME):
        source = root / name
        if not source.exists():
            continue
        try:
            # Nobody writes the backup: opened as it is, SQLite puts no files beside it.
            old = driver.connect(source, read_only=True, immutable=name == BACKUP_NAME)
        except OutOfSpace:
            raise  # the old index may be sound: with room it is read
        except (KvdbError, driver.sqlite3.Error, UnicodeDecodeError):
            continue
        try:
            driver.schema_state(old, source)
            rest = _read_rest(old, own_columns)
        except StoreTooNew:
            raise
        except (KvdbError, driver.sqlite3.Error, UnicodeDecodeError):
            continue
        finally:
            old.close()
        sequences, lost = _write_rest(database, rest)
        if name == BACKUP_NAME:
            made = datetime.fromtimestamp(source.stat().st_mtime, UTC)
            lost.append(
                f"names, keys and history newer than the backup of {made:%Y-%m-%d %H:%M} UTC"
            )
        return sequences, lost
    with database.write() as connection:
        _set_settings(connection, [])
    return 0, ["named sequences, request history, settings and keys: no readable index or backup"]


@dataclass(slots=True)
class _Rows:
    """Rows of a table. Of kept totals the last value of each is its namespace's fingerprint."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


@dataclass(slots=True)
class _Rest:
    """Rows of an old index that shards do not hold; blocks by hash."""

    settings: list[tuple[str, str]]
    counters: list[tuple[str, int]]
    sequences: list[tuple[str, bytes | None, bytes, str, int | None, int]]
    request_columns: list[str]
    requests: list[tuple[Any, ...]]
    totals: dict[str, _Rows]
    answers: list[tuple[bytes, bytes, int]]
    access: list[tuple[bytes, str, int, int, int, int]]
    tenants: list[tuple[bytes, str]]
    own: dict[str, _Rows]


# Kept totals, each row with a namespace; 0, and a namespace that is gone, is "none".
TOTALS = ("request_totals", "hourly_totals", "eviction_totals", "write_totals")
# Tables that refer to no other.
OWN_TABLES = ("keys", "responses", "remotes")
KEPT_COUNTERS = ("tick", "age_ratio", "cow_copies", "blocks_dropped", "blocks_too_large")


def _read_rest(old: Connection, own_columns: set[str]) -> _Rest:
    columns = [row[1] for row in old.execute("PRAGMA table_info(requests)")]
    if not set(columns) <= own_columns:
        raise IntegrityError("The old index's history has columns that nobody made.")
    return _Rest(
        settings=old.execute("SELECT key, value FROM settings").fetchall(),
        counters=[
            row
            for row in old.execute("SELECT name, value FROM counters").fetchall()
            if row[0] in KEPT_COUNTERS
        ],
        sequences=old.execute(
            "SELECT s.name, b.hash, n.fingerprint, s.tenant, s.expires_at, s.created_at "
            "FROM sequences AS s JOIN namespaces AS n ON n.id = s.namespace_id "
            "LEFT JOIN blocks AS b ON b.id = s.tip_id WHERE s.name IS NOT NULL"
        ).fetchall(),
        request_columns=columns,
        requests=old.execute(
            "SELECT r.*, n.fingerprint, b.hash, t.hash FROM requests AS r "
            "LEFT JOIN namespaces AS n ON n.id = r.namespace_id "
            "LEFT JOIN blocks AS b ON b.id = r.deepest_block_id "
            "LEFT JOIN blocks AS t ON t.id = r.tip_id ORDER BY r.id"
        ).fetchall(),
        totals={table: _read_totals(old, table) for table in TOTALS if _columns(old, table)},
        answers=old.execute("SELECT key, tokens, created_at FROM answers ORDER BY id").fetchall()
        if _columns(old, "answers")
        else [],
        access=old.execute(
            "SELECT hash, queue, last_access, prev_access, hits, created_at FROM blocks "
            "WHERE state = 'live'"
        ).fetchall(),
        tenants=old.execute("SELECT fingerprint, tenant FROM namespaces").fetchall(),
        own={table: _read_own(old, table) for table in OWN_TABLES},
    )


def _read_own(old: Connection, table: str) -> _Rows:
    columns = list(_columns(old, table))
    rows = old.execute(f"SELECT * FROM {table}").fetchall() if columns else []  # noqa: S608
    return _Rows(columns, rows)


def _columns(connection: Connection, table: str) -> dict[str, bool]:
    """Each column, and whether it is part of the key; none where there is no table."""
    rows = connection.execute(f"PRAGMA table_info({table})").fetchall()
    return {row[1]: row[5] > 0 for row in rows}


def _read_totals(old: Connection, table: str) -> _Rows:
    rows = old.execute(
        f"SELECT t.*, n.fingerprint FROM {table} AS t "  # noqa: S608 - one of TOTALS
        "LEFT JOIN namespaces AS n ON n.id = t.namespace_id"
    ).fetchall()
    return _Rows(list(_columns(old, table)), rows)


def _write_totals(connection: Connection, table: str, old: _Rows) -> int:
    """Put the old totals in the place of those that triggers made of the rows taken over. Returns
    how many rows are of no use."""
    own = _columns(connection, table)
    if not set(old.columns) <= set(own):
        return len(old.rows)
    sums = ", ".join(f"{name} = {name} + excluded.{name}" for name, key in own.items() if not key)
    insert = (
        f"INSERT INTO {table} ({', '.join(old.columns)}) "  # noqa: S608 - names of our own table
        f"VALUES ({', '.join('?' * len(old.columns))}) ON CONFLICT DO UPDATE SET {sums}"
    )
    connection.execute(f"DELETE FROM {table}")  # noqa: S608 - one of TOTALS
    values = []
    for *row, fingerprint in old.rows:
        namespace = connection.execute(index.FIND_NAMESPACE, (fingerprint,)).fetchone()
        row[old.columns.index("namespace_id")] = 0 if namespace is None else namespace[0]
        values.append(row)
    return _each(connection, insert, values)


def _write_own(connection: Connection, table: str, old: _Rows) -> int:
    """Returns how many rows are of no use."""
    if not set(old.columns) <= set(_columns(connection, table)):
        return len(old.rows)
    insert = (
        f"INSERT INTO {table} ({', '.join(old.columns)}) "  # noqa: S608 - one of OWN_TABLES
        f"VALUES ({', '.join('?' * len(old.columns))})"
    )
    return _each(connection, insert, old.rows)


def _set_settings(connection: Connection, settings: list[tuple[str, str]]) -> int:
    """Returns how many settings are of no use: those of a damaged index may be anything."""
    usable = {key: value for key, value in settings if _usable_setting(key, value)}
    insert = "INSERT OR REPLACE INTO settings (key, value) VALUES (?, ?)"
    refused = _each(connection, insert, {**DEFAULT_SETTINGS, **usable}.items())
    return refused + len(settings) - len(usable)


def _usable_setting(key: object, value: object) -> bool:
    if key not in ("max_bytes", "min_free_bytes"):
        return isinstance(key, str) and isinstance(value, str)
    at_least = MIN_MAX_BYTES if key == "max_bytes" else 0
    return isinstance(value, str) and value.isdecimal() and int(value) >= at_least


def _each(connection: Connection, statement: str, rows: Iterable[Sequence[object]]) -> int:
    """Run a statement once a row; returns how many rows the index refused."""
    refused = 0
    for row in rows:
        try:
            connection.execute(statement, row)
        except driver.sqlite3.IntegrityError:
            refused += 1
    return refused


def _write_rest(database: Database, rest: _Rest) -> tuple[int, list[str]]:
    refused = sequences = 0
    lost: list[str] = []
    with database.write() as connection:
        refused += _set_settings(connection, rest.settings)
        set_tenant = "UPDATE namespaces SET tenant = ?2 WHERE fingerprint = ?1"
        refused += _each(connection, set_tenant, rest.tenants)
        refused += sum(_write_own(connection, *item) for item in rest.own.items())
        set_counter = "UPDATE counters SET value = ?2 WHERE name = ?1"
        refused += _each(connection, set_counter, rest.counters)
        for name, tip, fingerprint, tenant, expires, created in rest.sequences:
            namespace = connection.execute(index.FIND_NAMESPACE, (fingerprint,)).fetchone()
            block = None if tip is None else index.find_block(connection, tip)
            if namespace is None or (tip is not None and block is None):
                lost.append(f"sequence {name!r}: its blocks are gone")
                continue
            try:
                holding.add_sequence(
                    connection,
                    name=name,
                    namespace_id=namespace[0],
                    tip_id=None if block is None else block.id,
                    process_id=None,
                    tenant=tenant,
                    expires_at=expires,
                    now=created,
                )
            except driver.sqlite3.IntegrityError as error:
                lost.append(f"sequence {name!r}: {error}")
                continue
            sequences += 1
    for start in range(0, len(rest.access), ROWS_PER_TRANSACTION):
        with database.write() as connection:
            refused += _each(
                connection,
                "UPDATE blocks SET queue = ?2, last_access = ?3, prev_access = ?4, hits = ?5, "
                "created_at = ?6 WHERE hash = ?1",
                rest.access[start : start + ROWS_PER_TRANSACTION],
            )
    columns = rest.request_columns
    ids = ("namespace_id", "deepest_block_id", "tip_id")
    positions = {name: columns.index(name) for name in ids}
    insert = (
        f"INSERT INTO requests ({', '.join(columns)}) "  # noqa: S608 - names of our own table
        f"VALUES ({', '.join('?' * len(columns))})"
    )
    for start in range(0, len(rest.requests), ROWS_PER_TRANSACTION):
        with database.write() as connection:
            for row in rest.requests[start : start + ROWS_PER_TRANSACTION]:
                values, (fingerprint, deepest, tip) = list(row[:-3]), row[-3:]
                namespace = connection.execute(index.FIND_NAMESPACE, (fingerprint,)).fetchone()
                values[positions["namespace_id"]] = None if namespace is None else namespace[0]
                for column, hash_ in (("deepest_block_id", deepest), ("tip_id", tip)):
                    block = index.find_block(connection, hash_) if hash_ is not None else None
                    values[positions[column]] = None if block is None else block.id
                refused += _each(connection, insert, [values])
    for start in range(0, len(rest.answers), ROWS_PER_TRANSACTION):
        with database.write() as connection:
            rows = rest.answers[start : start + ROWS_PER_TRANSACTION]
            refused += _each(connection, INSERT_ANSWER, rows)
    with database.write() as connection:
        for table, totals in rest.totals.items():
            refused += _write_totals(connection, table, totals)
    if refused:
        lost.append(f"{refused} rows of the old index that are damaged")
    return sequences, lost
