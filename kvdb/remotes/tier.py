"""The remote tier of an open store: what remotes have of a prompt, and what they are given.

Nothing here waits for a network in the caller's thread: questions and fetches are things to be
asked whether they are done. A remote that is slow, dead, full or lies costs its budget.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvdb.driver import Connection
from kvdb.errors import KvdbError
from kvdb.remotes.behind import Behind
from kvdb.remotes.crew import Crew
from kvdb.remotes.economics import Rates
from kvdb.remotes.fetching import Fetching, Verdict
from kvdb.remotes.filling import Filling
from kvdb.remotes.found import Found, Question
from kvdb.remotes.peer import Clock, Peer
from kvdb.remotes.registry import open_remote
from kvdb.remotes.remote import Remote

if TYPE_CHECKING:
    from kvdb.match import Match
    from kvdb.members import Member
    from kvdb.remotes.configs import RemoteSpec
    from kvdb.sequences import Sequence as Running
    from kvdb.store import Store

log = logging.getLogger("kvdb.remotes")
T = TypeVar("T")

IDLE_SECONDS = 2.0
CLOSE_SECONDS = 5.0
# Restores that may read from remotes at the same time; more wait for one of these.
READERS = 8
RATES = "SELECT round_trip_ms, bytes_per_second FROM remotes WHERE id = ?"


class Tier:
    """Made by :func:`attach`; ``idle_seconds`` is how long a fetch may stand still,
    ``close_seconds`` how long :meth:`close` goes on sharing."""

    def __init__(
        self,
        store: Store,
        remotes: Sequence[tuple[RemoteSpec, Callable[[], Remote]]],
        *,
        clock: Clock | None = None,
        idle_seconds: float = IDLE_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._store = store
        self._idle_seconds = idle_seconds
        self._close_seconds = close_seconds
        self._readers = Crew("kvdb-remote-reader", READERS)
        self._pending = False
        self._mutex = threading.Lock()
        clock = clock or Clock(store.environment)
        self._environment = clock.environment
        with store.database.read() as connection:
            rows = [connection.execute(RATES, (spec.id,)).fetchone() for spec, _ in remotes]
        self.peers = [
            Peer(
                spec,
                opener,
                clock,
                Rates(self._environment.seconds, *(row or (None, None))),
                self._changed,
            )
            for (spec, opener), row in zip(remotes, rows, strict=True)
        ]
        writes = not store.read_only
        self._behind = [Behind(store, peer) for peer in self.peers if peer.writes and writes]

    def peer(self, name: str) -> Peer:
        return next(peer for peer in self.peers if peer.name == name)

    # -- reading -----------------------------------------------------------------------------

    def ask(self, match: Match, worth_ms: float | None = None) -> Question | None:
        """Ask all remotes for what of a prompt is not here; None where there is nobody to ask, or
        nobody who answers within ``worth_ms``, which it takes to compute it all."""
        record = self._store.describe(match.namespace)
        peers = [
            peer
            for peer in self.peers
            if peer.reads and peer.serves(record) and peer.rates.worth_asking(worth_ms)
        ]
        return Question(peers, record, match, self._environment) if peers else None

    def fetching(
        self,
        found: Found,
        accept: Callable[[Member], Verdict],
        *,
        fill: bool = True,
        running: Running | None = None,
        compute_seconds: float | None = None,
    ) -> Fetching:
        """Fetches for one request. With ``fill`` what comes goes into the store, held by
        ``running``. ``compute_seconds`` is what computing it all would take."""
        filling = None
        if fill and not self._store.read_only:
            filling = Filling(self._store, found.match, running)
        return Fetching(
            found, accept, filling, self._environment, self._idle_seconds, compute_seconds
        )

    def background(self, action: Callable[[], T]) -> Future[T]:
        """Run what reads by way of a Fetching, whose waits are bounded."""
        return self._readers.submit(action)

    # -- writing -----------------------------------------------------------------------------

    def stored(self, hashes: Sequence[bytes]) -> None:
        """Blocks were computed and stored here: remotes get them, behind requests."""
        for behind in self._behind:
            behind.add(hashes)

    def flush(self, seconds: float) -> bool:
        """Wait until remotes have what was stored before; False on time-out."""
        until = time.monotonic() + seconds
        return all([behind.flush(max(0.0, until - time.monotonic())) for behind in self._behind])

    def close(self) -> None:
        """Go on sharing for a bounded time, and say what is left."""
        until = time.monotonic() + self._close_seconds
        for behind in self._behind:
            left = behind.close(max(0.0, until - time.monotonic()))
            if left:
                log.warning("%d blocks were not shared with a remote; kvdb sync catches up", left)
        self._readers.close()
        for peer in self.peers:
            with contextlib.suppress(KvdbError, OSError):
                peer.close()
        if not self._store.read_only:
            with contextlib.suppress(KvdbError), self._store.database.write() as connection:
                self.count(connection)

    # -- counting ----------------------------------------------------------------------------

    def _changed(self) -> None:
        with self._mutex:
            if self._pending or self._store.read_only:
                return
            self._pending = True
        try:
            self._store.later(self.count)
        except KvdbError:
            self._pending = False  # the store is closing: close writes the rest

    def count(self, connection: Connection) -> None:
        """Add what was counted since the last time to the rows, in the caller's transaction."""
        self._pending = False
        for peer in self.peers:
            peer.counters.write(connection)


def attach(store: Store, specs: Sequence[RemoteSpec], **options: Any) -> Tier:
    """A tier of these remotes; each is opened when it is first needed."""
    return Tier(store, [(spec, partial(open_remote, spec.config)) for spec in specs], **options)
