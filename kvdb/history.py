"""Request history: one row a request."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvdb.driver import Connection
from kvdb.errors import UsageError
from kvdb.segments import Segment, dump_segments

MAX_TEXT = 32_768
SKIPS = ("full", "refill", "partial", "approximate", "none")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A row of ``requests``: what was asked, restored, refilled and computed, how long each part
    took (milliseconds), and why it missed; docs/schema.md describes every column. ``touched`` are
    the ids of the blocks it used; ``tip_hash`` is the block that its prompt and answer end in:
    ``tip_id`` in the row. ``unstored`` is why not all of its state was kept.

    The time to the first token is load + warmup + lookup + restore + prefill + first_sample -
    behind: what was restored or computed only behind a first token sampled from stored logits.
    """

    started_at: int
    namespace_id: int | None
    prompt_tokens: int
    restored_tokens: int
    refilled_tokens: int
    computed_tokens: int
    generated_tokens: int
    skip: str
    masked_tokens: int = 0
    matched_tokens: int | None = None
    tenant: str = ""
    client: str = ""
    miss_reason: str | None = None
    deepest_block_id: int | None = None
    segments: tuple[Segment, ...] = ()
    bytes_read: int = 0
    bytes_ram: int = 0
    bytes_remote: int = 0
    load_ms: float | None = None
    warmup_ms: float | None = None
    queued_ms: float | None = None
    lookup_ms: float | None = None
    restore_ms: float | None = None
    prefill_ms: float | None = None
    first_sample_ms: float | None = None
    behind_ms: float | None = None
    first_token_ms: float | None = None
    total_ms: float | None = None
    touched: tuple[int, ...] = ()
    tip_hash: bytes | None = None
    unstored: str | None = None
    kl: float | None = None
    remote: str | None = None
    remote_decision: str | None = None
    remote_tokens: int = 0
    remote_ms: float | None = None
    load_estimate_ms: float | None = None
    compute_estimate_ms: float | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for a row that the table would refuse."""
        if self.skip not in SKIPS:
            raise UsageError(f"skip must be one of {', '.join(SKIPS)}, not {self.skip!r}.")
        parts = (
            self.restored_tokens,
            self.refilled_tokens,
            self.computed_tokens,
            self.masked_tokens,
        )
        counts = (
            *parts,
            self.prompt_tokens,
            self.generated_tokens,
            self.matched_tokens or 0,
            self.bytes_read,
            self.bytes_ram,
            self.bytes_remote,
            self.remote_tokens,
        )
        if any(type(n) is not int or not 0 <= n < 1 << 62 for n in counts):
            raise UsageError("The counts of a request must be integers from 0 on.")
        if sum(parts) != self.prompt_tokens:
            raise UsageError("Restored, refilled, computed and masked must add up to the prompt.")


NO_COLUMNS = ("touched", "tip_hash")
_COLUMNS = tuple(f.name for f in fields(RequestRecord) if f.name not in NO_COLUMNS)
INSERT_REQUEST = (
    f"INSERT INTO requests ({', '.join(_COLUMNS)}, tip_id) "  # noqa: S608 - our own field names
    f"VALUES ({', '.join('?' * len(_COLUMNS))}, (SELECT id FROM blocks WHERE hash = ?))"
)
TRIM_REQUESTS = (
    "DELETE FROM requests WHERE id IN (SELECT id FROM requests WHERE id <= "
    "(SELECT max(id) FROM requests) - "
    "min(?1, (SELECT CAST(value AS INTEGER) FROM settings WHERE key = 'history_requests')) "
    "LIMIT 1000)"
)
TRIM_EVICTIONS = (
    "DELETE FROM evictions WHERE id IN (SELECT id FROM evictions WHERE id <= "
    "(SELECT max(id) FROM evictions) - "
    "min(?1, (SELECT CAST(value AS INTEGER) FROM settings WHERE key = 'history_evictions')) "
    "LIMIT 1000)"
)
# Hours count from the newest one on.
TRIM_HOURS = (
    "DELETE FROM hourly_totals WHERE hour_at <= (SELECT max(hour_at) FROM hourly_totals) - "
    "3600000000 * "
    "min(?1, (SELECT CAST(value AS INTEGER) FROM settings WHERE key = 'history_hours'))"
)


def insert_request(connection: Connection, record: RequestRecord) -> None:
    """Write one row."""
    values = {name: _storable(getattr(record, name)) for name in _COLUMNS}
    values["segments"] = dump_segments(record.segments)
    connection.execute(INSERT_REQUEST, [*values.values(), record.tip_hash])


def trim_history(connection: Connection, most: int) -> None:
    """Drop the oldest rows and hours beyond the kept number: settings ``history_*``, at most
    ``most``. Totals without an hour stay for good."""
    for trim in (TRIM_REQUESTS, TRIM_EVICTIONS, TRIM_HOURS):
        connection.execute(trim, (most,))


def _storable(value: object) -> object:
    """Text as SQLite takes it: no lone surrogates, and no longer than history is worth."""
    if not isinstance(value, str):
        return value
    return value[:MAX_TEXT].encode("utf-8", "replace").decode()
