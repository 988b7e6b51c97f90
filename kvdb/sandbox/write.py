"""The few changes that ad-hoc SQL may make: settings, and the deletion of history."""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import Any

from kvdb.driver import Connection, Database
from kvdb.errors import QueryError, UsageError
from kvdb.quotas import NAMESPACE_QUOTA, TENANT_QUOTA
from kvdb.sandbox.rules import authorizer
from kvdb.sandbox.statement import (
    DEFAULT_DEADLINE_SECONDS,
    DEFAULT_LIMIT,
    INSTRUCTIONS_PER_CHECK,
    Parameters,
    SqlResult,
    bound,
    check_limits,
    explained,
    fetch,
    run_sql,
)

# Others wait for writer.lock meanwhile, so a transaction is short, and long deletions are many.
MAX_WRITE_SECONDS = 0.5
ROWS_PER_TRANSACTION = 1000
MOST_ROWS = 10_000_000
PLAIN_DELETE = re.compile(
    r"\s*DELETE\s+FROM\s+(requests|evictions)(?:\s+WHERE\s(.*?))?\s*;?\s*",
    re.IGNORECASE | re.DOTALL,
)
WHOLE_NUMBERS = (
    "max_bytes",
    "min_free_bytes",
    "history_requests",
    "history_evictions",
    "history_hours",
)
LEAST = {"max_bytes": 16 << 20}


def run_write(
    database: Database,
    sql: str,
    params: Parameters = (),
    *,
    limit: int = DEFAULT_LIMIT,
    deadline: float = DEFAULT_DEADLINE_SECONDS,
) -> SqlResult:
    """Run one statement that may change ``settings`` and delete from ``requests`` and
    ``evictions``; the rows it returns, or one row with the number of rows affected.

    Each transaction holds ``writer.lock``, for at most half a second. A plain DELETE of history
    chooses its rows before, within ``deadline`` seconds, and deletes them in as many transactions
    as it needs; every other statement is one, and all or nothing.
    Raises QueryError for what is wrong, forbidden or too long, UsageError for a bad setting.
    """
    check_limits(sql, limit, deadline)
    plain = PLAIN_DELETE.fullmatch(sql)
    if plain is None:
        return _transaction(database, sql, params, limit)
    _transaction(database, f"EXPLAIN {sql}", params, limit)  # is it right as it stands?
    table, condition = plain[1].lower(), plain[2] or "1"
    try:
        ids = _chosen(database, table, condition, params, deadline)
    except QueryError:  # it says more than a condition, or what only one transaction can
        return _transaction(database, sql, params, limit)
    total = 0
    batch = f"DELETE FROM {table} WHERE id IN (SELECT value FROM json_each(?))"  # noqa: S608
    for first in range(0, len(ids), ROWS_PER_TRANSACTION):
        some = json.dumps(ids[first : first + ROWS_PER_TRANSACTION])
        total += _transaction(database, batch, (some,), limit).rows[0][0]
    return SqlResult(("rows_affected",), [(total,)], capped=False)


def _chosen(
    database: Database, table: str, condition: str, params: Parameters, deadline: float
) -> list[int]:
    """Ids of the rows that a DELETE would delete."""
    sql = f"SELECT id FROM {table} WHERE {condition}"  # noqa: S608 - one of two known names
    with contextlib.closing(database.sandboxed()) as connection:
        result = run_sql(connection, sql, params, limit=MOST_ROWS, deadline=deadline)
    return [id_ for (id_,) in result.rows]


def _transaction(database: Database, sql: str, params: Parameters, limit: int) -> SqlResult:
    problems: list[str] = []
    rule, compiled = authorizer(sql, problems, write=True), False

    def ask(*action: Any) -> int:
        nonlocal compiled
        compiled = True
        return rule(*action)

    with database.write() as connection:
        end = time.monotonic() + MAX_WRITE_SECONDS
        connection.set_authorizer(ask)
        connection.set_progress_handler(lambda: time.monotonic() > end, INSTRUCTIONS_PER_CHECK)
        try:
            with explained(problems, MAX_WRITE_SECONDS, end):
                cursor = connection.execute(sql, bound(params))
                if not compiled:
                    raise QueryError("There is no statement to run.")
                result = _result(cursor, limit)
        finally:
            connection.set_authorizer(None)
            connection.set_progress_handler(None, 0)
        _check_settings(connection)
    return result


def _result(cursor: Any, limit: int) -> SqlResult:
    if cursor.description is not None:
        return fetch(cursor, limit, lambda: False)
    return SqlResult(("rows_affected",), [(cursor.rowcount,)], capped=False)


def _check_settings(connection: Connection) -> None:
    """Raise UsageError, which takes the transaction back, when any setting is not one."""
    for key, value in connection.execute("SELECT key, value FROM settings ORDER BY key"):
        if key not in WHOLE_NUMBERS and not key.startswith((NAMESPACE_QUOTA, TENANT_QUOTA)):
            raise UsageError(
                f"{key!r} is not a setting of a store; known settings: "
                f"{', '.join(WHOLE_NUMBERS)}, {NAMESPACE_QUOTA}…, {TENANT_QUOTA}…."
            )
        least = LEAST.get(key, 0)
        if not (value.isascii() and value.isdecimal() and least <= int(value) < 1 << 63):
            raise UsageError(
                f"The setting {key} cannot be {value!r}: it is a whole number of at least {least}."
            )
