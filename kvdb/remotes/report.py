"""What pushes and pulls came to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvdb.snapshot.known import NamespaceNote

# As many bad objects are named.
MOST_NAMED = 1000
INTERRUPTED = "Interrupted."


@dataclass(slots=True)
class _Report:
    """``rejected`` objects were not what their keys say; ``named`` are the first of them, and why.
    ``salted`` namespaces were left out because they are a tenant's own. ``stopped`` says why it
    ended early, ``broken`` whether the remote is why; what was done until then stays."""

    rejected: int = 0
    named: dict[str, str] = field(default_factory=dict)
    salted: int = 0
    stopped: str = ""
    broken: bool = False

    def reject(self, key: str, why: str) -> None:
        self.rejected += 1
        if len(self.named) < MOST_NAMED:
            self.named[key] = why


@dataclass(slots=True)
class PushReport(_Report):
    """Of ``blocks`` chosen, those that ``went`` meanwhile or have no tokens (``withheld``) were not
    put. The others' objects: ``present`` there already, or ``stored`` (in a dry run: would be), or
    ``failed``. ``replaced`` of the stored ones took the place of bad ones."""

    blocks: int = 0
    went: int = 0
    withheld: int = 0
    present: int = 0
    stored: int = 0
    nbytes: int = 0
    replaced: int = 0
    failed: int = 0


@dataclass(slots=True)
class PullReport(_Report):
    """Of ``blocks`` that the remote has, ``present`` were here whole and ``new`` ones were not (in
    part, or at all); ``stored`` of these are in the store now, by ``got`` objects of ``nbytes``.
    ``left`` says how many were not taken, by reason: ``parent_missing``, ``too_large`` for this
    store, ``no_room``, ``incomplete`` (their required parts are nowhere); and namespaces that are
    ``undescribed``, and objects that ``went`` meanwhile. ``foreign`` objects are none of kvdb's."""

    namespaces: list[NamespaceNote] = field(default_factory=list)
    blocks: int = 0
    present: int = 0
    new: int = 0
    stored: int = 0
    got: int = 0
    nbytes: int = 0
    foreign: int = 0
    left: Counter[str] = field(default_factory=Counter)

    @property
    def came_to_nothing(self) -> bool:
        """True where there was something to have, and nothing of it could be."""
        return bool(self.rejected or self.left.total()) and not (self.stored or self.present)


@dataclass(slots=True)
class SyncReport:
    """One of both is None where the remote is not to be written or not to be read."""

    push: PushReport | None
    pull: PullReport | None
