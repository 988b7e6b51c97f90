"""One statement, within its limits of time, rows and bytes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdb import functions
from kvdb.driver import Connection, sqlite3
from kvdb.errors import MissingParameter, QueryError
from kvdb.functions import TokenText
from kvdb.sandbox.rules import MAX_SQL_CHARACTERS, authorizer, limit_lengths

DEFAULT_LIMIT = 1000
DEFAULT_DEADLINE_SECONDS = 10.0
MAX_RESULT_BYTES = 64 << 20
MAX_VALUE_BYTES = 16 << 20
# About 0.05 ms of SQLite's work, as long as no function is slow.
INSTRUCTIONS_PER_CHECK = 500

Parameters = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SqlResult:
    """Rows of an ad-hoc statement. ``capped`` is True when there were more rows than asked for."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    capped: bool


def run_sql(
    connection: Connection,
    sql: str,
    params: Parameters = (),
    *,
    limit: int = DEFAULT_LIMIT,
    deadline: float = DEFAULT_DEADLINE_SECONDS,
    token_text: TokenText | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    now_us: int | None = None,
) -> SqlResult:
    """Run one read-only statement and return at most ``limit`` rows.

    ``connection`` is read-only and belongs to the sandbox: its authorizer, functions and limits
    stay changed, so the caller uses it for nothing else. ``interrupted`` is asked often; True
    raises KeyboardInterrupt.
    Raises QueryError, in one sentence, for a statement that is wrong, forbidden or too expensive.
    """
    check_limits(sql, limit, deadline)
    problems: list[str] = []
    end = time.monotonic() + deadline
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    limit_lengths(connection)
    now_us = time.time_ns() // 1000 if now_us is None else now_us
    functions.register(connection, problems, now_us=now_us, token_text=token_text)
    connection.text_factory = text
    connection.set_authorizer(authorizer(sql, problems))
    connection.set_progress_handler(
        lambda: time.monotonic() > end or interrupted(), INSTRUCTIONS_PER_CHECK
    )
    with explained(problems, deadline, end, interrupted):
        cursor = connection.execute(sql, bound(params))
        if cursor.description is None:
            raise QueryError("There is no statement that returns rows; write a SELECT.")
        return fetch(cursor, limit, interrupted)


def check_limits(sql: str, limit: int, deadline: float) -> None:
    if limit < 0 or not deadline > 0:
        raise QueryError("The row limit must not be negative and the deadline must be above 0.")
    if len(sql) > MAX_SQL_CHARACTERS:
        raise QueryError(f"The statement is longer than {MAX_SQL_CHARACTERS} characters.")


def bound(params: Parameters) -> Parameters:
    """Named parameters, so that a missing one is known by its name."""
    return _Named(params) if isinstance(params, Mapping) or not params else params


class _Named(dict[str, Any]):
    """pysqlite asks a dict of its own class for every name that the statement has."""

    def __missing__(self, name: str) -> Any:
        raise MissingParameter(name)


class explained:
    """Turns what SQLite raises inside into QueryError, or into KeyboardInterrupt."""

    def __init__(
        self,
        problems: list[str],
        deadline: float,
        end: float,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._problems, self._deadline, self._end = problems, deadline, end
        self._interrupted = interrupted

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: Any, _traceback: object) -> None:
        if isinstance(error, MemoryError):
            raise QueryError(NEEDS_MEMORY) from error
        if not isinstance(error, sqlite3.Error | sqlite3.Warning | ValueError | OverflowError):
            return
        if self._interrupted():
            raise KeyboardInterrupt from error
        if str(error) == "interrupted" and time.monotonic() < self._end:
            raise KeyboardInterrupt from error  # SQLite swallows the one of its handler
        raise QueryError(explain(error, self._problems, self._deadline)) from error


def text(raw: bytes) -> str:
    """A text value as Python's. Text that is not UTF-8 is shown as far as it is."""
    if len(raw) > MAX_VALUE_BYTES:
        raise QueryError(TOO_LONG)
    return raw.decode("utf-8", "replace")


TOO_LONG = f"A value is longer than {MAX_VALUE_BYTES >> 20} MiB; take a part of it with substr()."
STOPPED = "The statement was stopped after {:g} seconds."
NEEDS_MEMORY = (
    "The statement needs more memory than it may use; sort or collect fewer rows, or add a LIMIT."
)


def fetch(cursor: Any, limit: int, interrupted: Callable[[], bool]) -> SqlResult:
    """At most ``limit`` rows. Raises QueryError when they are too large for memory."""
    columns = tuple(str(column[0]) for column in cursor.description)
    rows: list[tuple[Any, ...]] = []
    nbytes = 0
    for row in cursor:
        if interrupted():
            raise KeyboardInterrupt
        if len(rows) == limit:
            cursor.close()
            return SqlResult(columns, rows, capped=True)
        nbytes += sys.getsizeof(row) + sum(map(sys.getsizeof, row))
        if nbytes > MAX_RESULT_BYTES:
            raise QueryError(
                f"The result is larger than {MAX_RESULT_BYTES >> 20} MiB; select fewer columns "
                "or rows."
            )
        rows.append(tuple(row))
    cursor.close()
    return SqlResult(columns, rows, capped=False)


def explain(error: Exception, problems: list[str], deadline: float) -> str:
    """One sentence for what SQLite refused."""
    if problems:
        return problems[0]
    if isinstance(error, UnicodeEncodeError):
        return "The statement holds bytes that are not valid text."
    message = str(error).strip()
    if message == "interrupted":
        return STOPPED.format(deadline)
    if "one statement at a time" in message:
        return "Only one statement can be run at a time."
    if "out of memory" in message:
        return NEEDS_MEMORY
    if message == "datatype mismatch":
        return (
            "Datatype mismatch: where a number is needed, write it, or CAST(:name AS INTEGER) for "
            "a value given as text."
        )
    if "bindings supplied" in message or "has no name" in message:
        return "The statement's values do not fit it; give each one a name, such as :id."
    return f"{message[:1].upper()}{message[1:500].rstrip('.')}."
