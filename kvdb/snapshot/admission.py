"""What becomes of a good member on its way into a store: the rules that imports and pulls share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvdb import index
from kvdb.driver import Connection
from kvdb.errors import IntegrityError
from kvdb.identity import ROOT_PARENT
from kvdb.members import Member
from kvdb.shards import NamespaceRecord
from kvdb.visible import Incoming, missing_parts

if TYPE_CHECKING:
    from kvdb.store import Store

FIND_BUILD = "SELECT id FROM builds WHERE namespace_id = ? AND digest = ?"
# A build that this store does not know: no row has this id.
NO_BUILD = -1
# What goes into a shard's header must leave it under its cap.
MAX_EXTRA_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Admitted:
    """``member`` is to be stored: its parts are those that the store lacks. ``stands_on_stored``:
    its parent is in the store, and must stay until it is."""

    member: Member
    stands_on_stored: bool


class _Parent(NamedTuple):
    """What a block must be like to stand on another one."""

    depth: int
    is_full: bool
    exact: bool
    build: str | None
    is_coming: bool


class Admission:
    """Decides about members, parents first. It remembers those that are on their way, until
    :meth:`forget`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._parents: dict[bytes, _Parent] = {}
        self._namespaces: dict[bytes, int] = {}

    def fits(self, record: NamespaceRecord) -> bool:
        """False where the store keeps no block as large as one of this namespace may be."""
        return block_bytes(record) <= self._store.limit.block_bytes

    def admit(self, member: Member) -> Admitted | Literal["present", "parent_missing"]:
        """Decide about a member that is checked. Raises IntegrityError for one that cannot be:
        its parent cannot bear it, or it has more keys beside its tokens than a shard takes."""
        if sum(map(len, member.extra or ())) > MAX_EXTRA_BYTES:
            raise IntegrityError("A block has too many keys beside its tokens.")
        with self._store.database.read() as connection:
            namespace_id = self._namespace_id(connection, member.record)
            parent = self._parent(connection, member, namespace_id)
            if parent is None:
                return "parent_missing"
            if parent.depth + 1 != member.depth or not parent.is_full:
                raise IntegrityError("A block stands on one that cannot bear it.")
            if not (parent.exact and parent.build in (None, member.build)):
                member = replace(member, exact=False)
            names = _missing(connection, member, namespace_id)
        if member.is_whole:
            self._parents[member.hash] = _Parent(
                member.depth,
                member.token_count == member.record.block_tokens,
                member.exact,
                member.build,
                bool(names),
            )
        if not names:
            return "present"
        parts = tuple(part for part in member.parts if part.part in names)
        return Admitted(replace(member, parts=parts), not parent.is_coming)

    def forget(self) -> None:
        """All that were on their way are in the store now."""
        self._parents.clear()

    def _namespace_id(self, connection: Connection, record: NamespaceRecord) -> int | None:
        known = self._namespaces.get(record.fingerprint)
        if known is not None:
            return known
        row = connection.execute(index.FIND_NAMESPACE, (record.fingerprint,)).fetchone()
        if row is None:
            return None
        self._namespaces[record.fingerprint] = row[0]
        return int(row[0])

    def _parent(
        self, connection: Connection, member: Member, namespace_id: int | None
    ) -> _Parent | None:
        """The block that one stands on, on its way or in the store."""
        if member.parent == ROOT_PARENT:
            return _Parent(-1, True, True, None, True)
        known = self._parents.get(member.parent)
        if known is not None:
            return known
        row = index.find_block(connection, member.parent)
        if row is None or not row.held or row.namespace_id != namespace_id:
            return None
        digest = connection.execute(
            "SELECT digest FROM builds WHERE id = ?", (row.build_id,)
        ).fetchone()
        return _Parent(
            row.depth,
            row.token_count == member.record.block_tokens,
            bool(row.exact),
            None if digest is None else digest[0],
            False,
        )


def block_bytes(record: NamespaceRecord) -> int:
    """The most that the parts of a block of this namespace have."""
    return sum(part.nbytes(record.block_tokens) for part in record.layout.parts)


def _missing(connection: Connection, member: Member, namespace_id: int | None) -> list[str]:
    """Parts that the store lacks, or must replace by exact ones."""
    names = [part.part for part in member.parts]
    if namespace_id is None:
        return names
    build_id = None
    if member.build is not None:
        row = connection.execute(FIND_BUILD, (namespace_id, member.build)).fetchone()
        build_id = NO_BUILD if row is None else row[0]
    return missing_parts(
        connection,
        Incoming(
            namespace_id,
            member.record.layout,
            member.hash,
            member.parent,
            member.depth,
            "import",
            member.exact,
            build_id,
        ),
        names,
    )
