"""The verbs that ask a store and look after it: sql, evict, compact, quotas. Part of Store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdb.clock import Environment
from kvdb.compaction import CompactionReport, Compactor
from kvdb.driver import Database
from kvdb.errors import StoreReadOnly, UsageError
from kvdb.functions import TokenText
from kvdb.limit import Limit
from kvdb.match import Namespace
from kvdb.quotas import NAMESPACE_QUOTA, TENANT_QUOTA, set_quota
from kvdb.retention import EvictionReport, Retention
from kvdb.room import Room
from kvdb.sandbox import SqlResult, run_sql


class Upkeep:
    """What :class:`kvdb.store.Store` inherits. A store that is open for reading has neither
    retention nor compactor: what would change it raises StoreReadOnly."""

    path: Path
    environment: Environment
    database: Database
    limit: Limit
    _retention: Retention | None
    _compactor: Compactor | None
    _room: Room | None

    def require_writable(self) -> None:
        """Raise StoreClosed or StoreReadOnly where this store object cannot write."""
        raise NotImplementedError

    def require_retention(self) -> Retention:
        self.require_writable()
        if self._retention is None:
            raise StoreReadOnly(f"The store at {self.path} is open for reading only.")
        return self._retention

    def require_room(self) -> Room:
        self.require_writable()
        if self._room is None:
            raise StoreReadOnly(f"The store at {self.path} is open for reading only.")
        return self._room

    def sql(
        self,
        sql: str,
        params: Sequence[Any] | Mapping[str, Any] = (),
        *,
        limit: int = 1000,
        deadline: float = 10.0,
        token_text: TokenText | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> SqlResult:
        """Run one read-only statement in the sandbox, in this process. Raises QueryError in one
        sentence. A server uses :func:`kvdb.sandbox.run_in_child` instead."""
        connection = self.database.sandboxed()
        try:
            return run_sql(
                connection,
                sql,
                params,
                limit=limit,
                deadline=deadline,
                token_text=token_text,
                interrupted=interrupted,
                now_us=self.environment.now_us(),
            )
        finally:
            connection.close()

    def evict(
        self,
        *,
        to_bytes: int | None = None,
        namespace_id: int | None = None,
        dry_run: bool = False,
        progress: Callable[[EvictionReport], None] | None = None,
    ) -> EvictionReport:
        """Evict until the directory holds at most ``to_bytes`` (default: its limit)."""
        target = self.limit.max_bytes if to_bytes is None else to_bytes
        if target < 0:
            raise UsageError("The size to evict to must not be negative.")
        keep = self.require_retention()
        excess = self.used_bytes() - target
        if excess <= 0:
            return EvictionReport()
        if dry_run:
            return keep.plan(excess, namespaces=None if namespace_id is None else [namespace_id])
        return keep.free(
            excess,
            reason="manual",
            namespaces=None if namespace_id is None else [namespace_id],
            progress=progress,
            compact=self._compact_waste,
        )

    def set_quota(
        self, nbytes: int | None, *, namespace: Namespace | None = None, tenant: str = ""
    ) -> None:
        """Bound the stored bytes of a namespace, or else of all namespaces of a tenant; None lifts
        the bound. What is stored already goes with the next put that needs room."""
        key = TENANT_QUOTA + tenant
        if namespace is not None:
            key = NAMESPACE_QUOTA + namespace.fingerprint.hex()
        self.require_writable()
        with self.database.write() as connection:
            set_quota(connection, key, nbytes)

    def _compact_waste(self) -> int:
        return 0 if self._compactor is None else self._compactor.run(small=False).freed_bytes

    def used_bytes(self) -> int:
        """What the directory holds, as the limit counts it."""
        with self.database.read() as connection:
            return self.limit.used(connection)

    def compact(
        self, *, progress: Callable[[CompactionReport], None] | None = None
    ) -> CompactionReport:
        """Give back the bytes of dead parts and join small shards; no block is lost."""
        self.require_writable()
        if self._compactor is None:
            raise StoreReadOnly(f"The store at {self.path} is open for reading only.")
        return self._compactor.run(progress=progress)

    def rewrite_shard(self, shard_id: int) -> bool:
        """See :meth:`kvdb.compaction.Compactor.rewrite`."""
        return self._compactor is not None and self._compactor.rewrite(shard_id)
