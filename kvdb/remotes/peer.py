"""One remote as the tier uses it: opened when it is needed, asked within its budget, counted."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from kvdb.clock import Environment
from kvdb.errors import KvdbError
from kvdb.remotes.breaker import Breaker
from kvdb.remotes.counters import Counters
from kvdb.remotes.crew import Crew
from kvdb.remotes.described import namespace_object
from kvdb.remotes.economics import Rates
from kvdb.remotes.naming import namespace_key
from kvdb.remotes.remote import Put, Remote
from kvdb.shards import NamespaceRecord

if TYPE_CHECKING:
    from kvdb.remotes.configs import RemoteSpec

log = logging.getLogger("kvdb.remotes")

# What a remote is used for. One that answers may have objects that never come, and one that gives
# may take nothing: what goes well in one way says little of the others.
Use = Literal["ask", "get", "put"]
USES: tuple[Use, ...] = get_args(Use)
# Threads that ask, and threads that fetch: a remote that hangs keeps no more than these.
ASKING, FETCHING = 2, 2
# How long an answer is believed. What turned out to be wrong is not fetched again for long.
ABSENT_SECONDS, PRESENT_SECONDS, BAD_SECONDS = 5.0, 60.0, 600.0
MAX_KNOWN = 100_000
CLOSE_SECONDS = 1.0


class _Known(NamedTuple):
    present: bool
    until: float


@dataclass(frozen=True, slots=True)
class Clock:
    """What a peer takes from outside: time, and chance."""

    environment: Environment
    jitter: Callable[[], float] = random.random


class Peer:
    """A remote and what is known of it. ``changed`` has what was counted written
    soon; what went well can wait for the next request's row."""

    def __init__(
        self,
        spec: RemoteSpec,
        opener: Callable[[], Remote],
        clock: Clock,
        rates: Rates,
        changed: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.reads = spec.reads
        self.writes = spec.writes
        self.budget_seconds = spec.budget_ms / 1e3
        self.rates = rates
        self.counters = Counters(spec.id, rates)
        self.breakers = {use: Breaker(clock.environment.seconds, clock.jitter) for use in USES}
        self.asking = Crew(f"kvdb-ask-{spec.name}", ASKING)
        self.fetching = Crew(f"kvdb-fetch-{spec.name}", FETCHING)
        self._clock = clock.environment
        self._opener = opener
        self.changed = changed
        self._remote: Remote | None = None
        self._opening = threading.Lock()
        self._closed = False
        self._known: dict[str, _Known] = {}
        self._bad: set[str] = set()
        self._described: set[bytes] = set()
        self._mutex = threading.Lock()

    def serves(self, record: NamespaceRecord) -> bool:
        """Tenants' own namespaces are shared only where that is asked for."""
        return self.spec.config.salted or not record.salt

    def open(self) -> Remote:
        """The remote, opened on first use. Raises KvdbError where it cannot be."""
        with self._opening:
            if self._remote is None:
                self._remote = self._opener()
            return self._remote

    def down_seconds(self, *uses: Use) -> float:
        """How much longer one of these uses is not to be tried."""
        return max(self.breakers[use].down_seconds for use in uses)

    def close(self) -> None:
        self._closed = True
        self.asking.close()
        self.fetching.close()
        remote, self._remote = self._remote, None
        if remote is not None:
            closing = Crew(f"kvdb-close-{self.name}", 1)
            with suppress(Exception):  # it is given up in any case
                closing.submit(remote.close).result(CLOSE_SECONDS)
            closing.close()

    @contextmanager
    def watched(self, use: Use) -> Iterator[Remote]:
        """The remote for one call; how that ends is what the breaker learns. Errors go on."""
        try:
            yield self.open()
        except Exception as error:
            self.went_wrong(use, error)
            raise
        self.breakers[use].succeeded()
        self._note_down()

    def went_wrong(self, use: Use, error: Exception) -> None:
        if self._closed:
            return  # what is cut off by us says nothing of the remote
        self.breakers[use].failed()
        self.counters.add("failed")
        self.counters.went_wrong(str(error) or type(error).__name__, self._clock.now_us())
        self._note_down()
        self.changed()
        if not isinstance(error, KvdbError | OSError):
            log.error("the remote %s failed, by a defect", self.name, exc_info=error)

    def was_late(self) -> None:
        """An answer did not come within its budget."""
        self.breakers["ask"].late()
        self.counters.add("late")
        self._note_down()
        self.changed()

    def _note_down(self) -> None:
        down = self.down_seconds(*USES)
        self.counters.down(self._clock.now_us() + int(down * 1e6) if down else None)

    # -- what is there -----------------------------------------------------------------------

    def recall(self, keys: Sequence[str]) -> list[bool] | None:
        """What is known of some keys; None where one of them must be asked for."""
        now = self._clock.seconds()
        with self._mutex:
            known = [self._known.get(key) for key in keys]
        if any(entry is None or entry.until < now for entry in known):
            return None
        return [entry is not None and entry.present for entry in known]

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which objects are there, in one round trip for those that are not known. Runs in a
        thread of ``asking``; raises what the remote does."""
        now = self._clock.seconds()
        with self._mutex:
            known = {key: entry for key in keys if (entry := self._known.get(key)) is not None}
        unknown = [key for key in keys if key not in known or known[key].until < now]
        if unknown:
            with self.watched("ask") as remote:
                found = remote.exists_many(unknown)
            self.rates.answered(self._clock.seconds() - now)
            self.counters.add("asked", len(unknown))
            self.counters.add("found", sum(found))
            for key, present in zip(unknown, found, strict=True):
                known[key] = self.learn(key, present=present)
        return [known[key].present for key in keys]

    def learn(self, key: str, *, present: bool, bad: bool = False) -> _Known:
        """Remember what became of a key; a ``bad`` object is as good as none."""
        seconds = BAD_SECONDS if bad else PRESENT_SECONDS if present else ABSENT_SECONDS
        entry = _Known(present and not bad, self._clock.seconds() + seconds)
        with self._mutex:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known.get(key)
            believed = known is not None and known.until > self._clock.seconds()
            if key in self._bad and present and not bad and known is not None and believed:
                return known
            self._known[key] = entry
            if bad:
                self._bad.add(key)
        return entry

    def reject(self, key: str, why: str) -> None:
        """A wrong object lies under a key."""
        self.counters.add("rejected")
        self.counters.went_wrong(why, self._clock.now_us())
        self.learn(key, present=False, bad=True)

    def is_bad(self, key: str) -> bool:
        """Whether a wrong object was met under this key: one of ours is to replace it."""
        return key in self._bad

    def replaced(self, key: str) -> None:
        with self._mutex:
            self._bad.discard(key)
            self._known.pop(key, None)
        self.learn(key, present=True)

    # -- what is put -------------------------------------------------------------------------

    def describe(self, record: NamespaceRecord) -> None:
        """Put the namespace's description beside its first object, once: what is not put says
        nothing to the breaker."""
        if record.fingerprint in self._described:
            return
        text = memoryview(namespace_object(record))
        with self.watched("put") as remote:
            (state,) = remote.put_many([Put(namespace_key(record.fingerprint), [text])])
        if state in ("stored", "present"):
            self._described.add(record.fingerprint)
