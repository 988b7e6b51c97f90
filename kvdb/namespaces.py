"""Namespaces of a store, and the builds that computed state in them. Part of Store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from kvdb import index
from kvdb.builds import Build, define, find_or_add_build, set_verdict
from kvdb.clock import Environment
from kvdb.driver import Database
from kvdb.errors import (
    OutOfSpace,
    StoreLocked,
    StoreMissing,
    StoreReadOnly,
    StoreUnavailable,
    UsageError,
)
from kvdb.identity import DEFAULT_BLOCK_TOKENS, ModelIdentity, namespace_fingerprint
from kvdb.layout import Layout
from kvdb.match import Namespace
from kvdb.shards import NamespaceRecord
from kvdb.vacant import drop_vacant


class Namespaces:
    """What :class:`kvdb.store.Store` inherits."""

    database: Database
    environment: Environment
    _process_id: int | None
    _records: dict[int, NamespaceRecord]
    _handles: WeakValueDictionary[tuple[int, str], Namespace]  # by id and model name
    _builds: dict[int, str]

    @property
    def read_only(self) -> bool:
        """True when the store was opened for reading."""
        raise NotImplementedError

    def namespace(
        self,
        identity: ModelIdentity,
        layout: Layout,
        *,
        model: str = "",
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        salt: bytes = b"",
        build: str | None = None,
        tenant: str = "",
    ) -> Namespace:
        """The key space of a model with a cache layout; made when it is new. Too many that hold
        nothing are dropped, but for those of which there is a handle.

        ``model`` is a name for people and takes no part in identity; ``tenant`` is whose quota it
        counts in. On a read-only store a new namespace raises StoreMissing. Raises UsageError for
        a bad ``block_tokens``.
        """
        fingerprint = namespace_fingerprint(identity, layout, block_tokens, salt, build)
        record = NamespaceRecord(fingerprint, model, identity, layout, block_tokens, salt, build)
        id_: int | None
        if self.read_only:
            id_ = self._find_namespace(fingerprint)
            if id_ is None:
                raise StoreMissing("The store holds nothing of this model and layout.")
        else:
            try:
                now = self.environment.now_us()
                with self.database.write() as connection:
                    id_ = index.ensure_namespace(connection, record, now, tenant)
                    used = {id_, *(used for used, _ in self._handles)}
                    gone = drop_vacant(connection, now, used, self._process_id)
                for other in gone:
                    self._records.pop(other, None)
            except (StoreLocked, OutOfSpace, StoreUnavailable, StoreReadOnly):
                # It cannot be written now: a key space that is there can still be read.
                id_ = self._find_namespace(fingerprint)
                if id_ is None:
                    raise
        self._records[id_] = record
        handle = Namespace(id_, fingerprint, model, layout, block_tokens)
        return self._handles.setdefault((id_, model), handle)

    def _find_namespace(self, fingerprint: bytes) -> int | None:
        with self.database.read() as connection:
            row = connection.execute(index.FIND_NAMESPACE, (fingerprint,)).fetchone()
        return None if row is None else int(row[0])

    def namespaces(self) -> list[Namespace]:
        """All namespaces of the store."""
        with self.database.read() as connection:
            rows = connection.execute(
                "SELECT id, fingerprint, model, layout, block_tokens FROM namespaces ORDER BY id"
            ).fetchall()
        return [Namespace(i, f, m, Layout.from_json(la), b) for i, f, m, la, b in rows]

    def describe(self, namespace: Namespace) -> NamespaceRecord:
        """A namespace as members and shards describe it. Raises UsageError for another store's."""
        return self._record(namespace)

    def _record(self, namespace: Namespace) -> NamespaceRecord:
        record = self._records.get(namespace.id)
        if record is None:
            with self.database.read() as connection:
                record = index.namespace_record(connection, namespace.id)
            self._records[namespace.id] = record
        if record.fingerprint != namespace.fingerprint:
            raise UsageError("The namespace belongs to another store.")
        return record

    def build(self, namespace: Namespace, digest: str, description: Mapping[str, Any]) -> Build:
        """The row of a build (code and hardware) in a namespace; the first build of an empty
        namespace is compatible at once, any other starts unchecked."""
        with self.database.write() as connection:
            build = find_or_add_build(
                connection,
                namespace.id,
                digest,
                json.dumps(dict(description), sort_keys=True),
                self.environment.now_us(),
            )
        self._builds[build.id] = digest
        return build

    def define(self, build: Build) -> Build:
        """Let a build that found nothing to be compared with define its namespace anew."""
        with self.database.write() as connection:
            return define(connection, build)

    def set_verdict(self, build: Build, compatible: bool, difference: float) -> Build:
        """Remember what the one-block check of a build measured (max relative difference)."""
        with self.database.write() as connection:
            return set_verdict(connection, build, compatible, difference)
