"""Which builds' state may be used here, and how fast this one computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvdb.errors import KvdbError
from kvdb.match import Trust
from kvdb.remotes.economics import moving

if TYPE_CHECKING:
    from kvdb.builds import Build
    from kvdb.match import Namespace
    from kvdb.members import Member
    from kvdb.remotes.fetching import Verdict
    from kvdb.store import Store

VERDICT = "SELECT id, verdict FROM builds WHERE namespace_id = ? AND digest = ?"
DIGEST = "SELECT digest FROM builds WHERE id = ?"
# Our own, where it has no row and nothing to be compared with: no row has this id.
NO_BUILD = -1
# Shorter prefills measure what every request costs.
LEAST_TOKENS = 16


class Builds:
    """Verdicts on builds other than our own, in one namespace. They are kept in the store; where
    that cannot be written, for as long as this lives. Our own counts as compatible without a row
    where it was ``compared``. Thread-safe."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        own: Build | None,
        digest: str | None,
        *,
        compared: bool = True,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._build = own
        self.own = digest if own is None else own.digest
        self._verdicts: dict[str, bool] = {}
        row = None if own is not None or digest is None else self._row(digest)
        id_ = row[0] if row is not None else None if compared else NO_BUILD
        self.trust = Trust(id_ if own is None else own.id)
        self._stranger = own is None and not compared  # to whoever wrote the store

    def verdict(self, digest: str | None) -> Verdict:
        """Whether blocks of a build may be used. Of who computed one nothing may be known: then
        nothing says what to compare it with."""
        if digest is None:
            return "refuse"
        if digest == self.own:
            return "use"
        if digest not in self._verdicts:
            row = self._row(digest)
            if row is None or row[1] == "unchecked" or not self._is_compatible:
                return "check"
            self._verdicts[digest] = row[1] == "compatible"
        return "use" if self._verdicts[digest] else "refuse"

    def exact(self, member: Member) -> Verdict:
        """Whether exact mode may use a block; if not, nothing that stands on it either."""
        return "use" if member.exact and member.build == self.own else "stop"

    def digest(self, build_id: int | None) -> str | None:
        row = self._one(DIGEST, (build_id,))
        return None if row is None else str(row[0])

    def judge(self, digest: str, difference: float) -> None:
        """A block of this build is so many tolerances from our own. It says which of the two is
        compatible, if the other is; nothing of both where neither is."""
        compatible = difference <= 1
        self._verdicts[digest] = compatible
        with suppress(KvdbError):  # one that cannot be written now is known here all the same
            other = self._store.build(self._namespace, digest, {})
            judged = other if self._is_compatible else self._build
            if judged is not None and (judged is other or other.verdict == "compatible"):
                self._store.set_verdict(judged, compatible, min(difference, 1e30))
        row = self._row(digest)
        if compatible and row is not None:
            self.trust = self.trust._replace(compared={*self.trust.compared, row[0]})

    @property
    def _is_compatible(self) -> bool:
        """Whether our own build is: it may have found nothing to be compared with, and another
        one after it."""
        row = None if self.own is None else self._row(self.own)
        return not self._stranger if row is None else row[1] == "compatible"

    def _row(self, digest: str) -> tuple[int, str] | None:
        row = self._one(VERDICT, (self._namespace.id, digest))
        return None if row is None else (int(row[0]), str(row[1]))

    def _one(self, statement: str, parameters: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A row; of a store that cannot be read now nothing is known."""
        try:
            with self._store.database.read() as connection:
                found: tuple[Any, ...] | None = connection.execute(statement, parameters).fetchone()
                return found
        except KvdbError:
            return None


class Speed:
    """Seconds that a token of a prompt takes: a moving average, which begins from ``past``."""

    def __init__(self, past: Callable[[], float | None]) -> None:
        self._past = past
        self._asked = False
        self._seconds: float | None = None

    def took(self, tokens: int, ms: float) -> None:
        if tokens >= LEAST_TOKENS and ms > 0:
            self._seconds = moving(self._seconds, ms / 1e3 / tokens)

    @property
    def seconds_per_token(self) -> float | None:
        """None where nothing was measured."""
        if self._seconds is None and not self._asked:
            self._asked = True
            self._seconds = self._past()
        return self._seconds
