"""The engine's side of the store: a store that fails costs a recompute, never a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from engine.events import Reuse
from kvdb.errors import KvdbError
from kvdb.history import RequestRecord
from kvdb.identity import Tokens
from kvdb.segments import Segment
from kvdb.writer import Payload, Ticket

if TYPE_CHECKING:
    from kvdb.builds import Build
    from kvdb.match import Match, Namespace, PartRef
    from kvdb.restore import Want
    from kvdb.sequences import Lease
    from kvdb.sequences import Sequence as Running
    from kvdb.store import Store

log = logging.getLogger("kvdb.engine")

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")
# Waiting for a queued write is cheaper than computing it again, up to a stalled disk.
FLUSH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Read:
    """What a read gave: the parts of blocks (by index) that it could not give, and its bytes."""

    lost: frozenset[tuple[int, str]]
    shared_ok: bool
    nbytes: int


class Storage:
    """One store, one namespace, one build. No method raises a KvdbError: each failure is logged
    once per kind, and answered as if nothing were stored."""

    def __init__(self, store: Store, namespace: Namespace, build: Build | None) -> None:
        self.store = store
        self.namespace = namespace
        self.build = build
        self._said: set[str] = set()

    @property
    def block_tokens(self) -> int:
        return self.namespace.block_tokens

    def lease(self, tokens: Tokens, reuse: Reuse, tenant: str) -> Lease | None:
        """What is stored of ``tokens``, held until release. Exact mode sees blocks of this build
        only, and nothing while the build has no row (a read-only store)."""
        # What earlier requests of this process left in the writer's queue is part of the store.
        self._try(lambda: self.store.flush(FLUSH_SECONDS), False)
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

    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            self._try(lease.release, None)

    def read(self, match: Match, wants: Sequence[Want]) -> Read:
        """Read what is wanted; after a failure all of it counts as lost."""
        result = self._try(lambda: self.store.read_parts(match, wants), None)
        if result is None:
            every = frozenset((index, want.part) for want in wants for index in want.blocks)
            return Read(every, False, 0)
        return Read(result.lost, result.shared_ok, result.nbytes)

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
    ) -> Ticket | None:
        """Hand blocks to the background writer; None where it takes none."""
        if self.store.read_only:
            self._say("the store is read-only: nothing new is stored")
            return None
        return self._try(
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

    def record(
        self,
        record: RequestRecord,
        tickets: Sequence[Ticket],
        segments: Callable[[], Sequence[Segment]],
    ) -> None:
        if not self.store.read_only:
            self._try(lambda: self.store.record(record, tickets, segments), None)

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
