"""Quotas: how many stored bytes a namespace, or all namespaces of a tenant, may have.

Kept in ``settings`` as ``quota.namespace.<fingerprint>`` and ``quota.tenant.<name>``; without one
only the limit of the whole store holds.
"""

from __future__ import annotations

from kvdb.driver import Connection
from kvdb.errors import UsageError

NAMESPACE_QUOTA = "quota.namespace."
TENANT_QUOTA = "quota.tenant."
FIND_QUOTA = "SELECT CAST(value AS INTEGER) FROM settings WHERE key = ?"
USAGE = (
    "SELECT id, live_bytes FROM namespaces WHERE id = ?1 OR "
    "(?2 AND tenant = (SELECT tenant FROM namespaces WHERE id = ?1))"
)


def set_quota(connection: Connection, key: str, nbytes: int | None) -> None:
    """Set or, with None, lift one quota. Raises UsageError for a negative one."""
    if nbytes is None:
        connection.execute("DELETE FROM settings WHERE key = ?", (key,))
        return
    if nbytes < 0:
        raise UsageError("A quota must not be negative.")
    connection.execute(
        "INSERT OR REPLACE INTO settings (key, value) VALUES (?, ?)", (key, str(nbytes))
    )


def tenant_quota(connection: Connection, tenant: str, otherwise: int) -> int:
    """The bytes that a tenant may have; ``otherwise`` where no quota is set."""
    row = connection.execute(FIND_QUOTA, (TENANT_QUOTA + tenant,)).fetchone()
    return otherwise if row is None else int(row[0])


def excess(connection: Connection, namespace_id: int, nbytes: int) -> tuple[int, list[int]] | None:
    """How far ``nbytes`` more would go beyond a quota, and the namespaces that share it; None
    when they fit."""
    row = connection.execute(
        "SELECT lower(hex(fingerprint)), tenant FROM namespaces WHERE id = ?", (namespace_id,)
    ).fetchone()
    if row is None:
        return None
    fingerprint, tenant = row
    for key, shared in (
        (NAMESPACE_QUOTA + fingerprint, False),
        (TENANT_QUOTA + tenant, True),
    ):
        quota = connection.execute(FIND_QUOTA, (key,)).fetchone()
        if quota is None:
            continue
        usage = connection.execute(USAGE, (namespace_id, shared)).fetchall()
        over = sum(live for _, live in usage) + nbytes - quota[0]
        if over > 0:
            return over, [id_ for id_, _ in usage]
    return None
