"""Request history: one row a request."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvdb.driver import Connection

SKIPS = ("full", "refill", "partial", "approximate", "none")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A row of ``requests``: what was asked, restored, refilled and computed, how long each part
    took (milliseconds), and why it missed. ``touched`` are the ids of the blocks it used;
    ``tip_hash`` is the block that its prompt and answer end in: ``tip_id`` in the row."""

    started_at: int
    namespace_id: int | None
    prompt_tokens: int
    restored_tokens: int
    refilled_tokens: int
    computed_tokens: int
    generated_tokens: int
    skip: str
    masked_tokens: int = 0
    tenant: str = ""
    client: str = ""
    miss_reason: str | None = None
    deepest_block_id: int | None = None
    segments: str | None = None
    bytes_read: int = 0
    load_ms: float | None = None
    lookup_ms: float | None = None
    restore_ms: float | None = None
    prefill_ms: float | None = None
    first_token_ms: float | None = None
    total_ms: float | None = None
    touched: tuple[int, ...] = ()
    tip_hash: bytes | None = None


_COLUMNS = tuple(f.name for f in fields(RequestRecord) if f.name not in ("touched", "tip_hash"))
INSERT_REQUEST = (
    f"INSERT INTO requests ({', '.join(_COLUMNS)}, tip_id) "  # noqa: S608 - our own field names
    f"VALUES ({', '.join('?' * len(_COLUMNS))}, (SELECT id FROM blocks WHERE hash = ?))"
)
TRIM_REQUESTS = (
    "DELETE FROM requests WHERE id <= (SELECT max(id) FROM requests) - "
    "(SELECT CAST(value AS INTEGER) FROM settings WHERE key = 'history_requests')"
)
TRIM_EVICTIONS = (
    "DELETE FROM evictions WHERE id IN (SELECT id FROM evictions WHERE id <= "
    "(SELECT max(id) FROM evictions) - "
    "(SELECT CAST(value AS INTEGER) FROM settings WHERE key = 'history_evictions') LIMIT 1000)"
)


def insert_request(connection: Connection, record: RequestRecord) -> None:
    """Write one row and drop rows beyond the kept number (settings ``history_*``)."""
    values = [getattr(record, name) for name in _COLUMNS]
    connection.execute(INSERT_REQUEST, [*values, record.tip_hash])
    connection.execute(TRIM_REQUESTS)
    connection.execute(TRIM_EVICTIONS)
