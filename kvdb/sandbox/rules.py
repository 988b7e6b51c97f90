"""What an ad-hoc statement may do: SQLite asks for every table, function and action it compiles."""

from __future__ import annotations

from collections.abc import Callable

from kvdb.driver import Connection, sqlite3

MAX_SQL_CHARACTERS = 100_000

# sqlite3.h; the modules name only some of them.
OK, DENY = 0, 1
DELETE, INSERT, READ, SELECT, UPDATE, FUNCTION, RECURSIVE = 9, 18, 20, 21, 23, 31, 33

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
    ago human_bytes token_text tokens
    """.split()  # noqa: SIM905 - a hundred quoted lines are harder to read
)
# Used inside the store's own views and triggers. A statement may reach them through these, never
# by name.
VIEW_FUNCTIONS = frozenset({"printf", "format", "replace", "instr", "trim"})

# What --write may change. Anything else in these tables, and every other table, is refused.
WRITABLE = frozenset(
    {
        (INSERT, "settings"),
        (UPDATE, "settings"),
        (DELETE, "settings"),
        (DELETE, "requests"),
        (DELETE, "evictions"),
    }
)
WRITE_RULE = "only settings may be changed, and rows of requests and evictions deleted"
NOT_READING = (
    "Only reading is allowed here; with kvdb query --write settings may be changed, and rows of "
    "requests and evictions deleted."
)
NOT_WRITABLE = f"With --write {WRITE_RULE}."
NOT_A_SELECT = "Only one SELECT over the store's tables and views is allowed."

Authorizer = Callable[[int, str | None, str | None, str | None, str | None], int]


def authorizer(sql: str, denials: list[str], *, write: bool = False) -> Authorizer:
    """Default-deny; why is appended to ``denials``.

    The names of the views that SQLite passes along cannot be trusted: a common table expression
    may take any of them. The statement's own text can: a function it does not name was called by a
    view of the store. A change inside a trigger is the store's own: a statement cannot make one.
    """
    text = sql.lower()
    from_views = {name for name in VIEW_FUNCTIONS if name not in text}

    def authorize(
        action: int, first: str | None, second: str | None, _db: str | None, inside: str | None
    ) -> int:
        if action in (READ, SELECT, RECURSIVE):
            return OK
        if action == FUNCTION:
            name = (second or "").lower()
            if name in FUNCTIONS or name in from_views:
                return OK
            denials.append(f"The function {name}() is not available here.")
        elif action in (INSERT, UPDATE, DELETE):
            if write and (inside is not None or (action, (first or "").lower()) in WRITABLE):
                return OK
            denials.append(NOT_WRITABLE if write else NOT_READING)
        else:
            denials.append(NOT_WRITABLE if write else NOT_A_SELECT)
        return DENY

    return authorize


def limit_lengths(connection: Connection) -> None:
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
