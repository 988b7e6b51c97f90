"""Safe ad-hoc SQL: one SELECT over the store's tables and views, within limits.

Opening a file read-only is no sandbox: ATTACH still creates files and VACUUM INTO still writes
copies. What is not allowed here is denied by SQLite's authorizer; time, rows and bytes are capped.

A deadline works between SQLite's instructions and cannot stop one long C function, so functions
whose time or memory can outgrow their arguments are left out or replaced. What remains, strings
grown by ``||``, is bounded by :func:`cap_process_memory` in programs that may afford it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdb.driver import Connection, sqlite3
from kvdb.errors import QueryError

DEFAULT_LIMIT = 1000
DEFAULT_DEADLINE_SECONDS = 10.0
MAX_RESULT_BYTES = 64 << 20
MAX_SQL_CHARACTERS = 100_000
MAX_PATTERN_CHARACTERS = 1_000
MAX_TEXT_CHARACTERS = 1_000_000
# About 0.1 ms of SQLite's work.
INSTRUCTIONS_PER_CHECK = 1_000

# sqlite3.h; the modules name only some of them.
OK, DENY = 0, 1
READ, SELECT, FUNCTION, RECURSIVE = 20, 21, 31, 33

# Left out on purpose: load_extension, randomblob, zeroblob, printf and format (a width of 10⁹),
# glob, replace, instr, trim, soundex, and likelihood hints nobody needs here.
FUNCTIONS = frozenset(
    """
    -> ->> abs acos asin atan atan2 avg ceil ceiling changes char coalesce concat concat_ws cos
    count cume_dist current_date current_time current_timestamp date datetime degrees dense_rank
    exp first_value floor group_concat hex if ifnull iif json json_array json_array_length
    json_each json_extract json_group_array json_group_object json_object json_quote json_tree
    json_type json_valid julianday lag last_value lead length like likely ln log log10 log2 lower
    max median min mod nth_value ntile nullif octet_length percent_rank percentile pi pow power
    quote radians random rank round row_number sign sin sqlite_version sqrt strftime string_agg
    substr substring subtype sum tan time timediff total trunc typeof unicode unixepoch unlikely
    upper
    """.split()  # noqa: SIM905 - a hundred quoted lines are harder to read
)
# Used inside the store's own views. A statement may reach them through a view, never by name.
VIEW_FUNCTIONS = frozenset({"printf", "format", "replace", "instr", "trim"})

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
) -> SqlResult:
    """Run one read-only statement and return at most ``limit`` rows.

    ``connection`` is read-only and belongs to the sandbox: its authorizer, functions and limits
    stay changed, so the caller uses it for nothing else.
    Raises QueryError, in one sentence, for a statement that is wrong, forbidden or too expensive.
    """
    if limit < 0 or deadline <= 0:
        raise QueryError("The row limit must not be negative and the deadline must be above 0.")
    if len(sql) > MAX_SQL_CHARACTERS:
        raise QueryError(f"The statement is longer than {MAX_SQL_CHARACTERS} characters.")
    denials: list[str] = []
    end = time.monotonic() + deadline
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    _limit_lengths(connection)
    for arguments in (2, 3):
        connection.create_function("like", arguments, _like, deterministic=True)
    connection.set_authorizer(_authorizer(sql, denials))
    connection.set_progress_handler(lambda: time.monotonic() > end, INSTRUCTIONS_PER_CHECK)
    try:
        cursor = connection.execute(sql, params)
        if cursor.description is None:
            raise QueryError("There is no statement that returns rows; write a SELECT.")
        columns = tuple(str(column[0]) for column in cursor.description)
        rows, capped = _fetch(cursor, limit)
        cursor.close()
    except MemoryError as error:
        raise QueryError("The statement needs more memory than it may use.") from error
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        if str(error) == "interrupted" and time.monotonic() < end:
            raise KeyboardInterrupt from error  # SQLite swallows the one of its handler
        raise QueryError(_explain(error, denials, deadline)) from error
    return SqlResult(columns, rows, capped)


def cap_process_memory(nbytes: int) -> None:
    """Let SQLite use at most ``nbytes`` in this process, in every connection, until it ends.

    SQLite lowers this limit but never raises it again: only for a program that runs one query.
    """
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute(f"PRAGMA hard_heap_limit = {int(nbytes)}")
    finally:
        connection.close()


def _authorizer(sql: str, denials: list[str]) -> Callable[..., int]:
    """Default-deny. The names of the views that SQLite passes along cannot be trusted: a common
    table expression may take any of them. The statement's own text can: a function it does not
    name was called by a view of the store."""
    text = sql.lower()
    from_views = {name for name in VIEW_FUNCTIONS if name not in text}

    def authorize(
        action: int, first: str | None, second: str | None, _db: str | None, _view: str | None
    ) -> int:
        if action in (READ, SELECT, RECURSIVE):
            return OK
        if action == FUNCTION:
            name = (second or "").lower()
            if name in FUNCTIONS or name in from_views:
                return OK
            denials.append(f"The function {name}() is not available here.")
            return DENY
        denials.append("Only one SELECT over the store's tables and views is allowed.")
        return DENY

    return authorize


def _limit_lengths(connection: Connection) -> None:
    """Shorter strings and simpler expressions, where the module can set limits (pysqlite3 and
    Python before 3.11 cannot)."""
    if not hasattr(connection, "setlimit"):
        return
    for name, value in (
        ("SQLITE_LIMIT_LENGTH", 10_000_000),
        ("SQLITE_LIMIT_SQL_LENGTH", 4 * MAX_SQL_CHARACTERS),
        ("SQLITE_LIMIT_ATTACHED", 0),
        ("SQLITE_LIMIT_EXPR_DEPTH", 200),
        ("SQLITE_LIMIT_COMPOUND_SELECT", 100),
    ):
        connection.setlimit(getattr(sqlite3, name), value)


def _fetch(cursor: Any, limit: int) -> tuple[list[tuple[Any, ...]], bool]:
    rows: list[tuple[Any, ...]] = []
    nbytes = 0
    for row in cursor:
        if len(rows) == limit:
            return rows, True
        nbytes += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if nbytes > MAX_RESULT_BYTES:
            raise QueryError(
                f"The result is larger than {MAX_RESULT_BYTES >> 20} MiB; select fewer columns "
                "or rows."
            )
        rows.append(tuple(row))
    return rows, False


def _explain(error: Exception, denials: list[str], deadline: float) -> str:
    if denials:
        return denials[0]
    text = str(error).strip()
    if text == "interrupted":
        return f"The statement was stopped after {deadline:g} seconds."
    if "one statement at a time" in text:
        return "Only one statement can be run at a time."
    if "user-defined function raised exception" in text:
        return (
            f"LIKE takes texts of up to {MAX_TEXT_CHARACTERS} characters and patterns of up to "
            f"{MAX_PATTERN_CHARACTERS}."
        )
    return f"{text[:1].upper()}{text[1:500].rstrip('.')}."


def _like(pattern: Any, text: Any, escape: Any = None) -> bool | None:
    """SQL's LIKE in one pass. SQLite's own takes minutes for a long pattern over a long text."""
    if pattern is None or text is None:
        return None
    pattern, text = _fold(pattern), _fold(text)
    if len(pattern) > MAX_PATTERN_CHARACTERS or len(text) > MAX_TEXT_CHARACTERS:
        raise ValueError("too long")
    pieces = _pieces(pattern, None if escape is None else _fold(escape))
    if len(pieces) == 1:
        return re.fullmatch(pieces[0][0], text, re.DOTALL) is not None
    first, last = pieces[0], pieces[-1]
    if len(text) < first[1] + last[1] or not re.match(first[0], text, re.DOTALL):
        return False
    position, end = first[1], len(text) - last[1]
    # Each piece is taken where it occurs first, which is always right and never backtracks.
    for regex, width in pieces[1:-1]:
        found = re.compile(regex, re.DOTALL).search(text, position, end)
        if found is None:
            return False
        position = found.start() + width
    return position <= end and re.compile(last[0], re.DOTALL).fullmatch(text, end) is not None


def _pieces(pattern: str, escape: str | None) -> list[tuple[str, int]]:
    """What stands between the ``%`` signs: a regular expression of fixed width, and the width."""
    pieces = [("", 0)]
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            part = re.escape(next(characters, ""))
        elif character == "%":
            pieces.append(("", 0))
            continue
        else:
            part = "." if character == "_" else re.escape(character)
        regex, width = pieces[-1]
        pieces[-1] = (regex + part, width + 1)
    return pieces


def _fold(value: Any) -> str:
    """Lower case in ASCII only, as LIKE compares."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text.lower() if text.isascii() else re.sub("[A-Z]", lambda m: m[0].lower(), text)
