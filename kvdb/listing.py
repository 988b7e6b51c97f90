"""What ``kvdb ls`` shows: one statement a kind, over the tables and documented views.

A filter that is NULL filters nothing. Each statement has a LIMIT of its own, so that sorting keeps
no more rows than are shown.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


@dataclass(frozen=True, slots=True)
class Listing:
    """A statement and the filters it takes."""

    sql: str
    filters: tuple[str, ...]

    def values(self, given: Mapping[str, Any], limit: int) -> dict[str, Any]:
        """Its parameters, from the filters given by name and the most rows to return."""
        values = {name: given.get(name) for name in self.filters}
        if "hash" in values:
            prefix = values.pop("hash")
            first, last = (None, None) if prefix is None else hash_range(prefix)
            values |= {"first_hash": first, "last_hash": last}
        return {**values, "limit": limit}


LISTINGS: Mapping[str, Listing] = {
    "blocks": Listing(
        """
        WITH chosen AS (
            SELECT b.id, b.last_access
            FROM blocks AS b
            WHERE (b.state = 'live' OR b.refs > 0)
                AND (:namespace IS NULL OR b.namespace_id = :namespace)
                AND (:state IS NULL OR b.state = :state)
                AND (:queue IS NULL OR b.queue = :queue)
                AND (:origin IS NULL OR b.origin = :origin)
                AND (:since IS NULL OR b.created_at >= :since)
                AND (:until IS NULL OR b.created_at < :until)
                AND (:min_tokens IS NULL OR b.token_count >= :min_tokens)
                AND (:min_hits IS NULL OR b.hits >= :min_hits)
                AND (:first_hash IS NULL OR b.id IN
                    (SELECT id FROM blocks WHERE hash BETWEEN :first_hash AND :last_hash))
                AND (:model IS NULL OR b.namespace_id IN
                    (SELECT id FROM namespaces WHERE model LIKE '%' || :model || '%'))
                AND (:tenant IS NULL OR b.namespace_id IN
                    (SELECT id FROM namespaces WHERE tenant = :tenant))
            ORDER BY b.last_access DESC, b.depth
            LIMIT :limit
        )
        SELECT u.hash, u.parent_hash, u.namespace_id, u.model, u.depth, u.token_count, u.state,
            u.queue, u.refs, u.hits, u.origin, u.exact, u.nbytes, u.created
        FROM chosen JOIN block_usage AS u ON u.id = chosen.id
        ORDER BY chosen.last_access DESC, u.depth
        """,
        (
            "namespace",
            "model",
            "tenant",
            "state",
            "queue",
            "origin",
            "hash",
            "since",
            "until",
            "min_tokens",
            "min_hits",
        ),
    ),
    "shards": Listing(
        """
        SELECT s.uuid, s.state, s.namespace_id, n.model, s.nbytes, s.live_parts, s.live_bytes,
            datetime(s.created_at / 1000000, 'unixepoch') AS created
        FROM shards AS s JOIN namespaces AS n ON n.id = s.namespace_id
        WHERE (:namespace IS NULL OR s.namespace_id = :namespace)
            AND (:state IS NULL OR s.state = :state)
            AND (:since IS NULL OR s.created_at >= :since)
            AND (:until IS NULL OR s.created_at < :until)
            AND (:model IS NULL OR n.id IN
                (SELECT id FROM namespaces WHERE model LIKE '%' || :model || '%'))
            AND (:tenant IS NULL OR n.tenant = :tenant)
        ORDER BY s.id DESC
        LIMIT :limit
        """,
        ("namespace", "model", "tenant", "state", "since", "until"),
    ),
    "namespaces": Listing(
        """
        SELECT id, lower(hex(fingerprint)) AS fingerprint, model, tenant, block_tokens, live_blocks,
            live_tokens, live_bytes, datetime(created_at / 1000000, 'unixepoch') AS created,
            datetime(used_at / 1000000, 'unixepoch') AS used
        FROM namespaces
        WHERE (:namespace IS NULL OR id = :namespace)
            AND (:since IS NULL OR used_at >= :since)
            AND (:until IS NULL OR used_at < :until)
            AND (:min_tokens IS NULL OR live_tokens >= :min_tokens)
            AND (:model IS NULL OR model LIKE '%' || :model || '%')
            AND (:tenant IS NULL OR tenant = :tenant)
        ORDER BY used_at DESC, id DESC
        LIMIT :limit
        """,
        ("namespace", "model", "tenant", "since", "until", "min_tokens"),
    ),
    "sequences": Listing(
        """
        SELECT s.id, s.name, s.namespace_id, n.model, s.tenant, lower(hex(b.hash)) AS tip,
            b.depth * n.block_tokens + b.token_count AS tokens,
            s.process_id IS NOT NULL AS running,
            datetime(s.created_at / 1000000, 'unixepoch') AS created,
            datetime(s.expires_at / 1000000, 'unixepoch') AS expires
        FROM sequences AS s
        JOIN namespaces AS n ON n.id = s.namespace_id
        LEFT JOIN blocks AS b ON b.id = s.tip_id
        WHERE (:namespace IS NULL OR s.namespace_id = :namespace)
            AND (:since IS NULL OR s.created_at >= :since)
            AND (:until IS NULL OR s.created_at < :until)
            AND (:min_tokens IS NULL OR b.depth * n.block_tokens + b.token_count >= :min_tokens)
            AND (:model IS NULL OR n.id IN
                (SELECT id FROM namespaces WHERE model LIKE '%' || :model || '%'))
            AND (:tenant IS NULL OR s.tenant = :tenant)
        ORDER BY s.id DESC
        LIMIT :limit
        """,
        ("namespace", "model", "tenant", "since", "until", "min_tokens"),
    ),
    "requests": Listing(
        """
        SELECT r.id, datetime(r.started_at / 1000000, 'unixepoch') AS started, r.namespace_id,
            n.model, r.client, r.tenant, r.skip, r.prompt_tokens, r.restored_tokens,
            r.refilled_tokens, r.computed_tokens, r.masked_tokens, r.generated_tokens,
            round(r.first_token_ms, 1) AS first_token_ms, r.miss_reason
        FROM requests AS r LEFT JOIN namespaces AS n ON n.id = r.namespace_id
        WHERE (:namespace IS NULL OR r.namespace_id = :namespace)
            AND (:skip IS NULL OR r.skip = :skip)
            AND (:reason IS NULL OR r.miss_reason = :reason)
            AND (:client IS NULL OR r.client = :client)
            AND (:tenant IS NULL OR r.tenant = :tenant)
            AND (:since IS NULL OR r.started_at >= :since)
            AND (:until IS NULL OR r.started_at < :until)
            AND (:min_tokens IS NULL OR r.prompt_tokens >= :min_tokens)
            AND (:model IS NULL OR n.id IN
                (SELECT id FROM namespaces WHERE model LIKE '%' || :model || '%'))
        ORDER BY r.id DESC
        LIMIT :limit
        """,
        (
            "namespace",
            "model",
            "tenant",
            "client",
            "skip",
            "reason",
            "since",
            "until",
            "min_tokens",
        ),
    ),
}


def moment(text: str, now_us: int) -> int:
    """Unix microseconds from ``2h`` (that long ago; s, min, h, d, w), ``2026-08-31`` or
    ``2026-08-31 12:00`` (UTC unless it says otherwise). Raises ValueError."""
    span = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*(s|min|h|d|w)\s*", text)
    if span is not None:
        return max(0, now_us - int(float(span[1]) * UNITS[span[2]] * 1_000_000))
    try:
        when = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError("is neither a time such as 2026-08-31 12:00 nor a span such as 2h") from (
            None
        )
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return int(when.timestamp() * 1_000_000)


def hash_range(prefix: str) -> tuple[bytes, bytes]:
    """The first and the last block hash that begin with ``prefix`` in hex. Raises ValueError."""
    digits = prefix.lower()
    if not re.fullmatch(r"[0-9a-f]{0,64}", digits):
        raise ValueError("is not the beginning of a hash in hex")
    return bytes.fromhex(digits.ljust(64, "0")), bytes.fromhex(digits.ljust(64, "f"))
