"""What ``kvdb ls`` shows: one statement a kind, over the tables and documented views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Listing:
    """A statement with the named parameters it takes; each one may be None, which filters
    nothing."""

    sql: str
    filters: tuple[str, ...]


LISTINGS: Mapping[str, Listing] = {
    "blocks": Listing(
        """
        SELECT hash, parent_hash, namespace_id, depth, token_count, state, queue, refs, hits,
            origin, exact, nbytes, created
        FROM block_usage
        WHERE (:namespace IS NULL OR namespace_id = :namespace)
            AND (:state IS NULL OR state = :state)
            AND (:hash IS NULL OR substr(hash, 1, length(:hash)) = lower(:hash))
        ORDER BY namespace_id, last_access DESC, depth
        """,
        ("namespace", "state", "hash"),
    ),
    "shards": Listing(
        """
        SELECT uuid, state, namespace_id, nbytes, live_parts, live_bytes,
            datetime(created_at / 1000000, 'unixepoch') AS created
        FROM shards
        WHERE (:namespace IS NULL OR namespace_id = :namespace)
            AND (:state IS NULL OR state = :state)
        ORDER BY id
        """,
        ("namespace", "state"),
    ),
    "namespaces": Listing(
        """
        SELECT id, lower(hex(fingerprint)) AS fingerprint, model, block_tokens, live_blocks,
            live_tokens, live_bytes, datetime(created_at / 1000000, 'unixepoch') AS created,
            datetime(used_at / 1000000, 'unixepoch') AS used
        FROM namespaces
        WHERE :namespace IS NULL OR id = :namespace
        ORDER BY used_at DESC
        """,
        ("namespace",),
    ),
    "sequences": Listing(
        """
        SELECT s.id, s.name, s.namespace_id, lower(hex(b.hash)) AS tip, s.tenant,
            s.process_id IS NOT NULL AS running,
            datetime(s.created_at / 1000000, 'unixepoch') AS created,
            datetime(s.expires_at / 1000000, 'unixepoch') AS expires
        FROM sequences AS s LEFT JOIN blocks AS b ON b.id = s.tip_id
        WHERE :namespace IS NULL OR s.namespace_id = :namespace
        ORDER BY s.id
        """,
        ("namespace",),
    ),
    "requests": Listing(
        """
        SELECT r.id, datetime(r.started_at / 1000000, 'unixepoch') AS started, r.namespace_id,
            r.client, r.tenant, r.skip, r.prompt_tokens, r.restored_tokens, r.refilled_tokens,
            r.computed_tokens, r.generated_tokens, round(r.first_token_ms, 1) AS first_token_ms,
            r.miss_reason
        FROM requests AS r
        WHERE (:namespace IS NULL OR r.namespace_id = :namespace)
            AND (:skip IS NULL OR r.skip = :skip)
        ORDER BY r.id DESC
        """,
        ("namespace", "skip"),
    ),
}
