"""Responses of OpenAI's API, kept so that a client can come back to them: by id, and as the
conversation that another one goes on from. Bounded for each tenant by number, bytes and age."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdb.store import Store

MAX_RESPONSES = 1000
MAX_BYTES = 256 << 20
MAX_AGE_SECONDS = 30 * 86_400
# A conversation is followed back at most this often.
MAX_CHAIN = 1000

INSERT = (
    "INSERT INTO responses (id, tenant, previous_id, created_at, nbytes, input, response) "
    "VALUES (?, ?, ?, ?, ?, ?, ?)"
)
FIND = "SELECT response FROM responses WHERE id = ? AND tenant = ? AND created_at > ?"
DELETE = "DELETE FROM responses WHERE id = ? AND tenant = ? RETURNING id"
# Newest first; the last one's previous_id is NULL where the conversation is whole.
CHAIN = """
WITH RECURSIVE chain (id, depth) AS (
    VALUES (?1, 1)
    UNION ALL
    SELECT r.previous_id, chain.depth + 1 FROM chain JOIN responses AS r ON r.id = chain.id
    WHERE r.previous_id IS NOT NULL AND chain.depth < ?3
)
SELECT r.input, r.response, r.previous_id FROM chain JOIN responses AS r ON r.id = chain.id
WHERE r.tenant = ?2 AND r.created_at > ?4 ORDER BY chain.depth
"""
DELETE_OLD = "DELETE FROM responses WHERE created_at <= ?"
# All but the newest, of which number and bytes are bounded.
DELETE_MORE = """
DELETE FROM responses WHERE id IN (
    SELECT id FROM (
        SELECT id, row_number() OVER newest AS number, sum(nbytes) OVER newest AS total
        FROM responses WHERE tenant = ?1
        WINDOW newest AS (ORDER BY created_at DESC, rowid DESC ROWS UNBOUNDED PRECEDING)
    ) WHERE number > ?2 OR (total > ?3 AND number > 1)
)
"""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """``input`` is the JSON list of the items that this response answered, without those of the
    responses before it; ``response`` is its JSON object."""

    input: str
    response: str


def keep_response(
    store: Store, id_: str, tenant: str, previous_id: str | None, kept: KeptResponse
) -> None:
    """Keep a response, and let go of the oldest ones beyond the bounds."""
    now = store.environment.now_us()
    nbytes = len(kept.input.encode()) + len(kept.response.encode())
    with store.database.write() as connection:
        row = (id_, tenant, previous_id, now, nbytes, kept.input, kept.response)
        connection.execute(INSERT, row)
        connection.execute(DELETE_OLD, (_oldest(now),))
        connection.execute(DELETE_MORE, (tenant, MAX_RESPONSES, MAX_BYTES))


def find_response(store: Store, id_: str, tenant: str) -> str | None:
    """A response as JSON; None where this tenant has none of that id."""
    oldest = _oldest(store.environment.now_us())
    with store.database.read() as connection:
        row = connection.execute(FIND, (id_, tenant, oldest)).fetchone()
    return None if row is None else str(row[0])


def find_conversation(store: Store, id_: str, tenant: str) -> list[KeptResponse] | None:
    """A response and all before it, oldest first; None where some of it is not kept, or is not
    this tenant's."""
    oldest = _oldest(store.environment.now_us())
    with store.database.read() as connection:
        rows = connection.execute(CHAIN, (id_, tenant, MAX_CHAIN, oldest)).fetchall()
    if not rows or rows[-1][2] is not None:
        return None
    return [KeptResponse(row[0], row[1]) for row in reversed(rows)]


def delete_response(store: Store, id_: str, tenant: str) -> bool:
    """Forget a response; False where this tenant has none of that id."""
    with store.database.write() as connection:
        return connection.execute(DELETE, (id_, tenant)).fetchone() is not None


def _oldest(now_us: int) -> int:
    return now_us - MAX_AGE_SECONDS * 1_000_000
