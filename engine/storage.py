"""The engine's side of the store: a store that fails costs a recompute, never a request."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from engine.builds import Builds, Speed
from engine.events import HoldState, Mark, Reuse
from kvdb.errors import KvdbError, QuotaExceeded, StoreMissing
from kvdb.explain.remembered import seconds_per_token
from kvdb.history import RequestRecord
from kvdb.identity import Tokens, chain_hashes
from kvdb.prefetch import ReadBlock, Staging, Wanted, stream_blocks
from kvdb.segments import Segment
from kvdb.writer import Payload, Ticket

if TYPE_CHECKING:
    from kvdb.answers import Answer
    from kvdb.builds import Build
    from kvdb.match import Match, MatchedBlock, Namespace
    from kvdb.reader import Location
    from kvdb.restore import Fetch, Want
    from kvdb.sequences import Lease
    from kvdb.sequences import Sequence as Running
    from kvdb.store import Store
    from kvdb.writer import Ticket

log = logging.getLogger("kvdb.engine")

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")
Places = Mapping[tuple[int, str], "Location"]
# Waiting for a queued write is cheaper than computing it again, up to a stalled disk.
FLUSH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Read:
    """What a read gave: the parts of blocks (by index) that it could not give, its bytes, and the
    bytes that came from the RAM tier instead."""

    lost: frozenset[tuple[int, str]]
    shared_ok: bool
    nbytes: int
    ram_nbytes: int = 0

    def __add__(self, other: Read) -> Read:
        return Read(
            self.lost | other.lost,
            self.shared_ok and other.shared_ok,
            self.nbytes + other.nbytes,
            self.ram_nbytes + other.ram_nbytes,
        )


@dataclass(frozen=True, slots=True)
class _Queued:
    """A put that may still be under way: its blocks' tokens begin at ``start``."""

    tokens: Tokens
    start: int
    ticket: Ticket

    def meets(self, tokens: Tokens) -> bool:
        """Whether ``tokens`` go through the beginning of what is put."""
        shared = self.start + 1
        return len(tokens) >= shared and np.array_equal(tokens[:shared], self.tokens[:shared])


class Storage:
    """One store, one namespace, one build, which was ``compared`` with what is stored. No method
    raises a KvdbError: each failure is logged once per kind, and answered as if nothing were
    stored."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        build: Build | None,
        digest: str | None = None,
        *,
        compared: bool = True,
    ) -> None:
        self.store = store
        self.namespace = namespace
        self.build = build
        self.builds = Builds(store, namespace, build, digest, compared=compared)
        self.speed = Speed(partial(self._try, self._past_speed, None))
        self._said: set[str] = set()
        self._queued: list[_Queued] = []

    @property
    def block_tokens(self) -> int:
        return self.namespace.block_tokens

    def lease(self, tokens: Tokens, reuse: Reuse, tenant: str) -> Lease | None:
        """What is stored of ``tokens``, held until release. Exact mode sees blocks of this build
        only, and nothing while the build has no row (a read-only store)."""
        exact = None
        if reuse == "exact":
            if self.build is None:
                return None
            exact = self.build.id
        return self._try(
            lambda: self.store.lease(
                self.namespace,
                tokens,
                exact_build=exact,
                share_tail=exact is None,
                tenant=tenant,
                trust=self.builds.trust if exact is None else None,
            ),
            None,
        )

    def _past_speed(self) -> float | None:
        with self.store.database.read() as connection:
            return seconds_per_token(connection, self.namespace.id)

    def written(self, tokens: Tokens) -> Callable[[], bool]:
        """A question whether all queued puts are done that the look-up of ``tokens`` could meet;
        its answer is yes in any case after some seconds, as on a stalled disk."""
        tickets = [queued.ticket for queued in self._queued if queued.meets(tokens)]
        until = time.monotonic() + FLUSH_SECONDS
        return lambda: all(ticket.done for ticket in tickets) or time.monotonic() > until

    def fork(self, lease: Lease, tenant: str) -> Lease:
        """Another running sequence on the state that a lease holds."""
        sequence = lease.sequence
        if sequence is None:
            return replace(lease)
        forked = self._try(
            lambda: self.store.sequence(self.namespace, sequence.tip_hash, tenant=tenant), None
        )
        return replace(lease, sequence=forked)

    def hold(self, tip_hash: bytes, ttl_seconds: float, tenant: str) -> HoldState:
        """Hold a chain for some time at least; not where the tenant may hold no more, or the chain
        is not stored. What one tenant holds is none of another's."""
        who = hashlib.sha256(tenant.encode()).hexdigest()[:16]
        name = f"ttl:{self.namespace.id}:{tip_hash.hex()}:{who}"

        def hold() -> HoldState:
            with contextlib.suppress(StoreMissing):
                self.store.find_sequence(name).renew(ttl_seconds)
                return "held"
            try:
                self.store.sequence(
                    self.namespace, tip_hash, name=name, ttl_seconds=ttl_seconds, tenant=tenant
                )
            except QuotaExceeded:
                return "share full"
            except StoreMissing:
                return "not stored"
            return "held"

        return "not stored" if self.store.read_only else self._try(hold, "not stored")

    def hold_prefix(self, tokens: Tokens, end: int, mark: Mark, tenant: str) -> HoldState:
        """Hold the chain of the first ``end`` of ``tokens``: by the block that ends there, where
        there is one, else by the one that covers it."""
        state: HoldState = "not stored"
        size = self.block_tokens
        for stop in (end, min(-(-end // size) * size, len(tokens))):
            if stop and state == "not stored":
                tip = chain_hashes(self.namespace.fingerprint, tokens[:stop], size)[-1]
                state = self.hold(tip, mark.ttl_seconds, tenant)
        return state

    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            self._try(lease.release, None)

    def read(self, match: Match, wants: Sequence[Want], fetch: Fetch | None = None) -> Read:
        """Read what is wanted, with ``fetch`` also from remotes; after a failure all of it counts
        as lost."""
        result = self._try(lambda: self.store.read_parts(match, wants, fetch), None)
        if result is None:
            every = frozenset((index, want.part) for want in wants for index in want.blocks)
            return Read(every, False, 0)
        return Read(result.lost, result.shared_ok, result.nbytes, result.ram_nbytes)

    def locate(self, block_ids: Sequence[int]) -> Places:
        """Where the parts of some blocks lie; nowhere after a failure."""
        return self._try(lambda: self.store.locate(block_ids), {})

    def stream(
        self, wanted: Sequence[Wanted], places: Places, staging: Staging
    ) -> Iterator[ReadBlock]:
        """See :func:`kvdb.prefetch.stream_blocks`; a failure ends it."""
        try:
            yield from stream_blocks(self.store, wanted, places, staging)
        except KvdbError as error:
            self._say_failed(error)

    def read_part(self, block: MatchedBlock, name: str) -> Bytes | None:
        return self._try(lambda: self.store.read_part(block.parts[name], block), None)

    def put(
        self,
        tokens: Tokens,
        payloads: Sequence[Payload],
        *,
        origin: str,
        exact: bool,
        advance: Running | None,
    ) -> Ticket | None:
        """Hand blocks to the background writer; None where it takes none."""
        if self.store.read_only:
            self._say("read-only", "the store is read-only: nothing new is stored")
            return None
        ticket = self._try(
            lambda: self.store.put(
                self.namespace,
                tokens,
                payloads,
                origin=origin,
                exact=exact,
                build_id=None if self.build is None else self.build.id,
                advance=advance,
            ),
            None,
        )
        if ticket is not None:
            self.expect(tokens, payloads[0].index, [ticket])
        return ticket

    def expect(self, tokens: Tokens, index: int, tickets: Sequence[Ticket]) -> None:
        """Look-ups of ``tokens`` are to wait for these puts, of blocks from ``index`` on."""
        start = index * self.namespace.block_tokens
        self._queued = [queued for queued in self._queued if not queued.ticket.done]
        self._queued += [_Queued(tokens, start, ticket) for ticket in tickets]

    def record(
        self,
        record: RequestRecord,
        tickets: Sequence[Ticket],
        segments: Callable[[], Sequence[Segment]],
        answer: Answer | None = None,
    ) -> None:
        if not self.store.read_only:
            self._try(lambda: self.store.record(record, tickets, segments, answer), None)

    def answers(self, keys: Sequence[bytes]) -> Mapping[bytes, Sequence[Tokens]]:
        """See :meth:`kvdb.store.Store.answers`."""
        nothing: Mapping[bytes, Sequence[Tokens]] = {}
        return self._try(lambda: self.store.answers(keys), nothing)

    def _try(self, action: Callable[[], T], otherwise: T) -> T:
        try:
            return action()
        except KvdbError as error:
            self._say_failed(error)
            return otherwise

    def _say_failed(self, error: KvdbError) -> None:
        kind = type(error).__name__
        self._say(kind, f"the store failed, going on without it: {kind}: {error}")

    def _say(self, kind: str, message: str) -> None:
        if kind not in self._said:  # messages may differ by a number, without end
            self._said.add(kind)
            log.warning("%s", message)
