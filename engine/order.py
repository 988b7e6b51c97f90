"""Who goes next: interactive before batch requests, in order of arrival, none for ever last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from engine.events import Priority

# While a batch request has waited too long, it gets one turn in so many.
AGED_SHARE = 4


class Waiting(Protocol):
    """What the order looks at."""

    @property
    def priority(self) -> Priority: ...
    @property
    def arrived(self) -> float: ...


W = TypeVar("W", bound=Waiting)


class Order:
    """Sorts what could have the next turn, and remembers who had the last ones.

    A batch request has aged when it arrived ``ageing_seconds`` ago and is not done. The oldest
    such one has every fourth turn, so that interactive ones are slowed by a third at most.
    """

    def __init__(self, ageing_seconds: float, clock: Callable[[], float]) -> None:
        self._ageing = ageing_seconds
        self._clock = clock
        self._others = 0  # turns since an aged one had one

    def sort(self, waiting: Iterable[W]) -> list[W]:
        """Best first."""
        ranked = sorted(waiting, key=lambda one: (one.priority == "batch", one.arrived))
        if self._others >= AGED_SHARE - 1:
            aged = next((one for one in ranked if self._aged(one)), None)
            if aged is not None:
                ranked.remove(aged)
                ranked.insert(0, aged)
        return ranked

    def took(self, one: Waiting) -> None:
        """A turn was given to ``one``."""
        self._others = 0 if self._aged(one) else self._others + 1

    def _aged(self, one: Waiting) -> bool:
        return one.priority == "batch" and self._clock() - one.arrived >= self._ageing
