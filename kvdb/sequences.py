"""Sequences: a name or a running request that holds one block, its tip, and so its whole chain.

A fork is one row. Growing a tail that others share makes a new block and leaves the old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvdb import holding, index
from kvdb.errors import IntegrityError, QuotaExceeded, StoreMissing, UsageError
from kvdb.identity import Tokens, as_tokens
from kvdb.layout import Layout
from kvdb.match import Match, MatchedBlock, Namespace
from kvdb.quotas import tenant_quota
from kvdb.writer import Payload, PutResult

if TYPE_CHECKING:
    from types import TracebackType

    from kvdb.store import Store

SEQUENCE_TOKENS = """
WITH RECURSIVE chain (id, parent_id, depth) AS (
    SELECT id, parent_id, depth FROM blocks WHERE id = ?
    UNION ALL
    SELECT b.id, b.parent_id, b.depth FROM chain JOIN blocks AS b ON b.id = chain.parent_id
)
SELECT t.tokens, b.token_count FROM chain JOIN blocks AS b ON b.id = chain.id
LEFT JOIN block_tokens AS t ON t.block_id = chain.id ORDER BY chain.depth
"""
FIND_SEQUENCE = (
    "SELECT s.id, n.id, n.fingerprint, n.model, n.layout, n.block_tokens FROM sequences AS s "
    "JOIN namespaces AS n ON n.id = s.namespace_id WHERE s.name = ?"
)
# The named ones of a tenant, with the tokens that their chains have.
NAMED_SEQUENCES = """
SELECT s.name, n.model, coalesce(b.depth * n.block_tokens + b.token_count, 0), s.created_at,
    s.expires_at
FROM sequences AS s JOIN namespaces AS n ON n.id = s.namespace_id
LEFT JOIN blocks AS b ON b.id = s.tip_id
WHERE s.name IS NOT NULL AND s.tenant = ?1 AND (?2 IS NULL OR s.name = ?2)
    AND coalesce(s.expires_at > ?3, 1)
ORDER BY s.name
"""
REQUEST_TIP = (
    "SELECT b.hash, b.namespace_id FROM requests AS r JOIN blocks AS b ON b.id = r.tip_id "
    "WHERE r.id = ? AND (b.state = 'live' OR b.refs > 0)"
)
# Stored bytes of all blocks under a tenant's named sequences, and under one more tip.
HELD_BYTES = """
WITH RECURSIVE held (id) AS (
    SELECT tip_id FROM sequences
    WHERE tenant = ?1 AND name IS NOT NULL AND tip_id IS NOT NULL
    UNION
    SELECT ?2
    UNION
    SELECT b.parent_id FROM held JOIN blocks AS b ON b.id = held.id WHERE b.parent_id IS NOT NULL
)
SELECT coalesce(sum(p.nbytes), 0) FROM held JOIN parts AS p ON p.block_id = held.id
"""
# One without a time to end stays so.
RENEW_SEQUENCE = "UPDATE sequences SET expires_at = max(expires_at, ?) WHERE id = ? RETURNING id"
# Pins, names and TTLs may hold this share of a tenant's quota: the rest stays a cache.
HOLDABLE = 0.5
MAX_TTL_SECONDS = 1e11


class Sequence:
    """A handle on one row of ``sequences``. Not safe to use from two threads at once."""

    def __init__(self, store: Store, namespace: Namespace, id_: int, name: str | None) -> None:
        self._store = store
        self.namespace = namespace
        self.id = id_
        self.name = name

    @property
    def tip_hash(self) -> bytes | None:
        """Hash of the held block; None for an empty sequence. Raises StoreMissing once dropped."""
        with self._store.database.read() as connection:
            row = connection.execute(
                "SELECT b.hash FROM sequences AS s LEFT JOIN blocks AS b ON b.id = s.tip_id "
                "WHERE s.id = ?",
                (self.id,),
            ).fetchone()
        if row is None:
            raise StoreMissing(f"The sequence {self.name or self.id} was dropped.")
        return None if row[0] is None else bytes(row[0])

    def tokens(self) -> Tokens:
        """All token ids from the root to the tip."""
        with self._store.database.read() as connection:
            row = connection.execute(holding.SEQUENCE_TIP, (self.id,)).fetchone()
            if row is None:
                raise StoreMissing(f"The sequence {self.name or self.id} was dropped.")
            rows = connection.execute(SEQUENCE_TOKENS, row).fetchall()
        if any(row[0] is None for row in rows):
            raise IntegrityError("A held block has lost its tokens; run kvdb verify --repair.")
        if any(count and not tokens for tokens, count in rows):
            raise IntegrityError("The sequence was imported without its tokens.")
        return as_tokens(np.frombuffer(b"".join(row[0] for row in rows), dtype="<u4"))

    def advance(self, tip_hash: bytes) -> None:
        """Hold another block, which must be held now, instead of the present tip."""
        with self._store.database.write() as connection:
            row = index.find_block(connection, tip_hash)
            if row is None or not row.held or row.namespace_id != self.namespace.id:
                raise StoreMissing("The block to advance to is not in the sequence's namespace.")
            holding.move_sequence(connection, self.id, row.id)

    def fork(self, name: str | None = None) -> Sequence:
        """Another sequence on the same tip. Without a name it lives as long as this process."""
        return self._store.sequence(self.namespace, self.tip_hash, name=name)

    def append(self, tokens: Items[int], parts: Mapping[str, npt.NDArray[np.uint8]]) -> PutResult:
        """Grow by ``tokens``, whose state is given per required part as raw bytes for just these
        tokens. A short tail is read, joined with them and stored as a new block; waits until it
        is durable. Raises IntegrityError when the tail's payload is gone."""
        new = as_tokens(tokens)
        old = self.tokens()
        size = self.namespace.block_tokens
        first = len(old) // size
        tail_tokens = len(old) % size
        joined = self._join_tail(old, tail_tokens, new, parts)
        every = np.concatenate([old, new])
        payloads = []
        for block in range(first, -(-len(every) // size)):
            begin = block * size - (len(old) - tail_tokens)
            end = min(begin + size, tail_tokens + len(new))
            payloads.append(
                Payload(
                    block,
                    {
                        name: spec.pack(
                            [
                                [
                                    np.take(array, range(begin, end), axis=tensor.token_axis)
                                    for array, tensor in zip(layer, spec.tensors, strict=True)
                                ]
                                for layer in joined[name]
                            ]
                        )
                        for name, spec in self._required()
                    },
                )
            )
        return self._store.put(
            self.namespace, every, payloads, origin="decode", advance=self
        ).wait()

    def _required(self) -> list[tuple[str, Any]]:
        layout = self.namespace.layout
        if any(not layout.by_name[name].cuttable for name in layout.required):
            raise UsageError("Only state that is cut along tokens can be appended to.")
        return [(name, layout.by_name[name]) for name in layout.required]

    def _join_tail(
        self, old: Tokens, tail_tokens: int, new: Tokens, parts: Mapping[str, npt.NDArray[np.uint8]]
    ) -> dict[str, list[list[npt.NDArray[Any]]]]:
        block: MatchedBlock | None = None
        if tail_tokens:
            match = self._store.match(self.namespace, old, share_tail=False)
            block = match.blocks[-1] if match.complete else None
            if block is None or not block.live:
                raise IntegrityError("The tail's payload is gone; recompute it and put it again.")
        joined: dict[str, list[list[npt.NDArray[Any]]]] = {}
        for name, spec in self._required():
            if name not in parts or parts[name].nbytes != spec.nbytes(len(new)):
                raise UsageError(f"Part {name!r} must hold {spec.nbytes(len(new))} bytes.")
            fresh = spec.views(parts[name], len(new))
            if block is None:
                joined[name] = fresh
                continue
            raw = self._store.read_part(block.parts[name])
            if raw is None:
                raise IntegrityError("The tail's payload is damaged; compute it and put it again.")
            stored = spec.views(raw, tail_tokens)
            joined[name] = [
                [
                    np.concatenate([a, b], axis=t.token_axis)
                    for a, b, t in zip(before, after, spec.tensors, strict=True)
                ]
                for before, after in zip(stored, fresh, strict=True)
            ]
        return joined

    def renew(self, ttl_seconds: float) -> None:
        """Last at least so long from now on. Raises StoreMissing once dropped, UsageError for a
        time that is none."""
        expires = _expiry(self._store, ttl_seconds)
        with self._store.database.write() as connection:
            row = connection.execute(RENEW_SEQUENCE, (expires, self.id)).fetchone()
        if row is None:
            raise StoreMissing(f"The sequence {self.name or self.id} was dropped.")

    def drop(self) -> None:
        """Let go of the chain. Blocks stay until they are evicted. Quiet when done before."""
        with self._store.database.write() as connection:
            holding.drop_sequence(connection, self.id)


@dataclass(slots=True)
class Lease:
    """A match whose blocks cannot be evicted until it is released (or this process dies)."""

    match: Match
    sequence: Sequence | None

    def release(self) -> None:
        if self.sequence is not None:
            sequence, self.sequence = self.sequence, None
            sequence.drop()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def create_sequence(
    store: Store,
    namespace: Namespace,
    tip_hash: bytes | None,
    name: str | None,
    ttl_seconds: float | None,
    tenant: str,
    owner: int | None,
) -> Sequence:
    """See :meth:`kvdb.store.Store.sequence`; ``owner`` is the process row of an unnamed one."""
    expires = None if ttl_seconds is None else _expiry(store, ttl_seconds)
    if name is not None and not (name and name.isprintable()):
        raise UsageError("A sequence's name must be printable text.")
    now = store.environment.now_us()
    with store.database.write() as connection:
        holding.drop_expired(connection, now)
        tip = None
        if tip_hash is not None:
            row = index.find_block(connection, tip_hash)
            if row is None or not row.held or row.namespace_id != namespace.id:
                raise StoreMissing("The block to hold is not in the store.")
            tip = row.id
        if name is not None:
            if connection.execute(FIND_SEQUENCE, (name,)).fetchone():
                raise UsageError(f"There is a sequence named {name!r} already.")
            (held,) = connection.execute(HELD_BYTES, (tenant, tip)).fetchone()
            quota = tenant_quota(connection, tenant, store.limit.max_bytes)
            allowed = int(quota * HOLDABLE)
            if held > allowed:
                raise QuotaExceeded(
                    f"Named sequences would hold {held} bytes, more than the {allowed} they may; "
                    "drop some first, or raise max_bytes."
                )
        id_ = holding.add_sequence(
            connection,
            name=name,
            namespace_id=namespace.id,
            tip_id=tip,
            process_id=owner,
            tenant=tenant,
            expires_at=expires,
            now=now,
        )
    return Sequence(store, namespace, id_, name)


@dataclass(frozen=True, slots=True)
class NamedSequence:
    """What a name holds; times in Unix µs."""

    name: str
    model: str
    tokens: int
    created_at: int
    expires_at: int | None


def named_sequences(store: Store, tenant: str, name: str | None = None) -> list[NamedSequence]:
    """The names that a tenant has and whose time is not over, or the one of them asked for."""
    with store.database.read() as connection:
        rows = connection.execute(NAMED_SEQUENCES, (tenant, name, store.environment.now_us()))
        return [NamedSequence(*row) for row in rows]


def _expiry(store: Store, ttl_seconds: float) -> int:
    if not 0 <= ttl_seconds < MAX_TTL_SECONDS:
        raise UsageError(f"A sequence cannot last {ttl_seconds} seconds.")
    return store.environment.now_us() + int(ttl_seconds * 1_000_000)


def request_tip(store: Store, request_id: int) -> tuple[Namespace, bytes]:
    """The block that a request's stored state ends in, and its namespace. Raises StoreMissing when
    there is no such request, or nothing of it is held any more."""
    with store.database.read() as connection:
        row = connection.execute(REQUEST_TIP, (request_id,)).fetchone()
    if row is None:
        raise StoreMissing(f"Of request {request_id} no state is stored; see kvdb ls requests.")
    hash_, namespace_id = row
    return next(n for n in store.namespaces() if n.id == namespace_id), bytes(hash_)


def find_sequence(store: Store, name: str) -> Sequence:
    """See :meth:`kvdb.store.Store.find_sequence`."""
    with store.database.read() as connection:
        row = connection.execute(FIND_SEQUENCE, (name,)).fetchone()
    if row is None:
        raise StoreMissing(f"There is no sequence named {name!r}.")
    id_, namespace_id, fingerprint, model, layout, block_tokens = row
    namespace = Namespace(namespace_id, fingerprint, model, Layout.from_json(layout), block_tokens)
    return Sequence(store, namespace, id_, name)
