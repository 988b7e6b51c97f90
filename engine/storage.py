"""The engine's side of the store: a store that fails costs a recompute, never a request."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from engine.events import Reuse
from kvdb.errors import KvdbError, QuotaExceeded, StoreMissing
from kvdb.history import RequestRecord
from kvdb.identity import Tokens
from kvdb.writer import Payload

if TYPE_CHECKING:
    from kvdb.builds import Build
    from kvdb.match import Match, Namespace, PartRef
    from kvdb.sequences import Lease
    from kvdb.sequences import Sequence as Running
    from kvdb.store import Store
    from kvdb.writer import Ticket

log = logging.getLogger("kvdb.engine")

Bytes = npt.NDArray[np.uint8]
Into = Mapping[str, Sequence[Sequence[npt.NDArray[Any]]]]
T = TypeVar("T")
# Waiting for a queued write is cheaper than computing it again, up to a stalled disk.
FLUSH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Read:
    """What a read gave: the blocks that it could not give, and its bytes."""

    bad: frozenset[int]
    shared_ok: bool
    nbytes: int


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
    """One store, one namespace, one build. No method raises a KvdbError: each failure is logged
    once per kind, and answered as if nothing were stored."""

    def __init__(self, store: Store, namespace: Namespace, build: Build | None) -> None:
        self.store = store
        self.namespace = namespace
        self.build = build
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
            ),
            None,
        )

    def written(self, tokens: Tokens) -> Callable[[], bool]:
        """A question whether all queued puts are done that the look-up of ``tokens`` could meet;
        its answer is yes in any case after some seconds, as on a stalled disk."""
        self._queued = [queued for queued in self._queued if not queued.ticket.done]
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

    def hold(self, tip_hash: bytes, ttl_seconds: float, tenant: str) -> bool:
        """Hold a chain for some time, anew where it is held already; False where the tenant may
        hold no more, or the chain is gone."""
        name = f"ttl:{self.namespace.id}:{tip_hash.hex()}"

        def hold() -> bool:
            with contextlib.suppress(StoreMissing):
                self.store.find_sequence(name).drop()
            try:
                self.store.sequence(
                    self.namespace, tip_hash, name=name, ttl_seconds=ttl_seconds, tenant=tenant
                )
            except (QuotaExceeded, StoreMissing):
                return False
            return True

        return not self.store.read_only and self._try(hold, False)

    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            self._try(lease.release, None)

    def read(self, match: Match, into: Into, blocks: Sequence[int], shared: bool) -> Read:
        """Read into ``into``; after a failure all of it counts as bad."""
        result = self._try(lambda: self.store.read(match, into, blocks=blocks, shared=shared), None)
        if result is None:
            return Read(frozenset(blocks), False, 0)
        return Read(frozenset(result.bad), result.shared_ok, result.nbytes)

    def read_part(self, part: PartRef) -> Bytes | None:
        return self._try(lambda: self.store.read_part(part), None)

    def put(
        self,
        tokens: Tokens,
        payloads: Sequence[Payload],
        *,
        origin: str,
        exact: bool,
        advance: Running | None,
    ) -> None:
        """Hand blocks to the background writer."""
        if self.store.read_only:
            self._say("the store is read-only: nothing new is stored")
            return
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
            start = payloads[0].index * self.namespace.block_tokens
            self._queued.append(_Queued(tokens, start, ticket))

    def record(self, record: RequestRecord) -> None:
        if not self.store.read_only:
            self._try(lambda: self.store.record(record), None)

    def _try(self, action: Callable[[], T], otherwise: T) -> T:
        try:
            return action()
        except KvdbError as error:
            self._say(f"the store failed, going on without it: {type(error).__name__}: {error}")
            return otherwise

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning("%s", message)


class Recorder:
    """Puts the blocks of one request, each once, as soon as their state exists.

    ``cut`` gives the parts of tokens start to end. ``known`` blocks are in the store already.
    """

    def __init__(
        self,
        storage: Storage,
        cut: Callable[[int, int], dict[str, Bytes]],
        known: Collection[int],
        *,
        exact: bool,
        running: Running | None,
    ) -> None:
        self._storage = storage
        self._cut = cut
        self._known = set(known)
        self._exact = exact
        self._running = running

    def put_range(self, tokens: Tokens, start: int, end: int, *, origin: str = "prefill") -> None:
        """Put the blocks that end in tokens ``start`` to ``end`` and are not known, one put per
        run. A last short block is put only where ``tokens`` end with it."""
        size = self._storage.block_tokens
        payloads: list[Payload] = []
        last = 0
        for block in range(start // size, -(-end // size)):
            stop = min((block + 1) * size, len(tokens))
            if stop > end:
                break
            if block in self._known:
                self._flush(tokens[:last], payloads, origin)
                continue
            payloads.append(Payload(block, self._cut(block * size, stop)))
            self._known.add(block)
            last = stop
        self._flush(tokens[:last], payloads, origin)

    def put_prompt_end(self, prompt: Tokens, logits: Bytes | None) -> None:
        """Put the prompt's last block, or what it lacks: its state, the logits after it."""
        size = self._storage.block_tokens
        block = (len(prompt) - 1) // size
        parts: dict[str, Bytes] = {}
        if block not in self._known:
            parts = self._cut(block * size, len(prompt))
            self._known.add(block)
        if logits is not None:
            parts["logits"] = logits
        if parts:
            self._flush(prompt, [Payload(block, parts)], "prefill")

    def put_generated(self, tokens: Tokens, start: int) -> None:
        """Put what decoding added to ``start`` tokens: whole blocks, and the tail there is."""
        self._exact = False  # one forward per token gives other bits than one per block
        self._known = {
            block for block in self._known if (block + 1) * self._storage.block_tokens <= start
        }
        self.put_range(tokens, start, len(tokens), origin="decode")

    def _flush(self, tokens: Tokens, payloads: list[Payload], origin: str) -> None:
        if payloads:
            self._storage.put(
                tokens, list(payloads), origin=origin, exact=self._exact, advance=self._running
            )
            payloads.clear()
