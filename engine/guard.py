"""The memory guard: a process stays under a ceiling, whatever is asked of it.

Model, RAM tier, live caches (at their longest, padded ones too) and the writer's queue count
together. When room is short the RAM tier gives way first, then prefill steps get shorter, then
idle models go and requests wait for others to end, and what can never fit is refused. MLX on a CPU
dies of an allocation that fails, so the guard must foresee, not catch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvdb.errors import OutOfMemory
from kvdb.ramtier import RamTier

# The RAM tier grows back only while this share of the ceiling stays free.
REGROW_BELOW = 0.8


@dataclass(frozen=True, slots=True)
class Gauges:
    """How memory is measured and given back. ``held`` are bytes of this process now; ``peak`` is
    the most that MLX has had in use since ``reset_peak``, ``active`` what it has now; ``release``
    gives back what is only cached."""

    held: Callable[[], int]
    active: Callable[[], int]
    peak: Callable[[], int]
    reset_peak: Callable[[], None]
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Sizes in bytes. ``held`` is measured, ``claimed`` promised to requests, ``ram`` in the RAM
    tier within ``ram_budget``. ``waits`` and ``refusals`` count requests."""

    ceiling: int | None
    held: int
    claimed: int
    ram: int
    ram_budget: int
    waits: int
    refusals: int


class Claim:
    """Memory promised to one request. Release it when the request ends, however it does."""

    def __init__(self, guard: Guard, nbytes: int) -> None:
        self._guard = guard
        self.nbytes = nbytes

    def release(self) -> None:
        """Idempotent."""
        nbytes, self.nbytes = self.nbytes, 0
        self._guard._give_back(nbytes)


class Guard:
    """One per process, shared by its engines. Without a ``ceiling`` it refuses nothing.

    Thread-safe.
    """

    def __init__(self, ceiling: int | None, gauges: Gauges) -> None:
        self.ceiling = ceiling
        self._gauges = gauges
        self._tiers: list[tuple[RamTier[Any], int]] = []  # with the budgets they may grow back to
        self._changed = threading.Condition()
        self._claimed = 0
        self._before = 0  # held, but for tiers, when nothing was claimed
        self._loading = 0  # weights that are on their way
        self._unload: Callable[[], bool] = lambda: False
        self._waits = self._refusals = 0
        self.settle()

    def include(self, tier: RamTier[Any]) -> None:
        """Count a RAM tier, and let it give way. Quiet when it is known."""
        with self._changed:
            if all(known is not tier for known, _ in self._tiers):
                self._tiers.append((tier, tier.budget))

    def when_short(self, unload: Callable[[], bool]) -> None:
        """Have ``unload`` called when a claim finds no room: it begins to unload an idle model, on
        a thread of its own, and says whether one goes."""
        self._unload = unload

    def settle(self) -> None:
        """Take what is held now, with no request running, as what the models themselves need. To
        be called when one was loaded."""
        with self._changed:
            if not self._claimed:
                self._gauges.release()
                self._before = max(0, self._gauges.held() - self._ram())

    def expect(self, nbytes: int) -> bool:
        """Keep room for a model's weights that will be loaded; False where there is none. To be
        followed by :meth:`arrived`."""
        with self._changed:
            if self._make_room(nbytes) < nbytes:
                return False
            self._loading += nbytes
            return True

    def arrived(self, nbytes: int, *, loaded: bool) -> None:
        """The model that was expected is there, or could not be ``loaded``."""
        with self._changed:
            self._loading -= nbytes
            if loaded and self._claimed:  # else it was measured
                self._before += nbytes
            self._changed.notify_all()

    def left(self, nbytes: int) -> None:
        """A model with so many bytes of weights was unloaded."""
        with self._changed:
            if self._claimed:
                self._before = max(0, self._before - nbytes)
            self.settle()
            self._changed.notify_all()

    def claim(self, nbytes: int, *, spare: int = 0, again: bool = False) -> Claim | None:
        """Promise ``nbytes`` to a request; None when it must wait for others to end or for an idle
        model to go, and ask ``again``. Beside others ``spare`` bytes must stay free for their
        steps. Raises OutOfMemory when it could not run alone."""
        with self._changed:
            fits = self.ceiling is None or self._before + nbytes <= self.ceiling
            wanted = nbytes + (spare if self._claimed else 0)
            if fits and self._make_room(wanted) >= wanted:
                self._claimed += nbytes
                return Claim(self, nbytes)
            wait = fits and (self._claimed > 0 or self._loading > 0)
        # Without the lock, which whoever unloads a model needs.
        wait = self._unload() or wait
        with self._changed:
            if wait:
                self._waits += not again
                return None
            self._refusals += 1
            raise OutOfMemory(self._refusal(nbytes))

    def wait(self, seconds: float) -> None:
        """Wait until a claim is given back, or for so long."""
        with self._changed:
            self._changed.wait(seconds)

    def room(self, nbytes: int) -> int:
        """Bytes free beyond all claims; where they are fewer than ``nbytes``, after the RAM tier
        gave way."""
        with self._changed:
            return self._make_room(nbytes)

    def stats(self) -> MemoryStats:
        with self._changed:
            budget = sum(tier.budget for tier, _ in self._tiers)
            return MemoryStats(
                self.ceiling,
                self._gauges.held(),
                self._claimed,
                self._ram(),
                budget,
                self._waits,
                self._refusals,
            )

    def steps(self, shortest: int) -> Steps:
        """The prefill steps of one model, which are multiples of ``shortest``."""
        return Steps(self, self._gauges, shortest)

    # -- with the lock held ------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> int:
        if self.ceiling is None:
            return nbytes
        room = self._free()
        if room < nbytes:
            self._gauges.release()
            room = self._free()
        for tier, _ in self._tiers:
            if room >= nbytes:
                break
            # The budget shrinks with it, or the next request would fill it again.
            tier.resize(max(0, tier.nbytes - (nbytes - room)))
            self._gauges.release()
            room = self._free()
        return room

    def _free(self) -> int:
        """Claims count in full from the start, measured memory as it comes: the larger counts."""
        promised = self._before + self._loading + self._ram() + self._claimed
        return (self.ceiling or 0) - max(self._gauges.held(), promised)

    def _ram(self) -> int:
        return sum(tier.nbytes for tier, _ in self._tiers)

    def _refusal(self, nbytes: int) -> str:
        return (
            f"The request needs {nbytes >> 20} MiB for its state, and with the model the process "
            f"may use {(self.ceiling or 0) >> 20} MiB in all: shorten it, or raise max_memory."
        )

    def _give_back(self, nbytes: int) -> None:
        with self._changed:
            self._claimed -= nbytes
            if not self._claimed:  # a model may have gone meanwhile
                self._before = max(0, min(self._before, self._gauges.held() - self._ram()))
            if self.ceiling is not None:
                for tier, budget in self._tiers:
                    if tier.budget < budget:
                        spare = int(self._free() - (1 - REGROW_BELOW) * self.ceiling)
                        tier.resize(min(budget, max(tier.budget, tier.nbytes + spare)))
            self._changed.notify_all()


class Steps:
    """How long the prefill steps of one model may be, learnt from those before.

    What a step needs besides the caches grows with its tokens and at most with the tokens it looks
    at: from what one step took follows a bound for the next. The first one is the shortest, and
    none is more than twice as long as the one before.
    """

    def __init__(self, guard: Guard, gauges: Gauges, shortest: int) -> None:
        self._guard = guard
        self._gauges = gauges
        self._shortest = shortest
        self._last: tuple[int, int, int] | None = None  # tokens, end, bytes

    def fit(self, wanted: int, at: int) -> int:
        """The longest step from token ``at`` on that fits, up to ``wanted``. Raises OutOfMemory
        when not even the shortest does."""
        if self._guard.ceiling is None:
            return wanted
        shortest = self._shortest
        if self._last is None:
            return shortest

        def bound(tokens: int) -> int:
            return self._bound(tokens, at + tokens)

        count = min(wanted, 2 * self._last[0]) // shortest
        need = bound(shortest)
        room = self._guard.room(bound(count * shortest))
        if room < need:
            raise OutOfMemory(
                f"A prefill step needs {need >> 20} MiB and {max(room, 0) >> 20} are left: shorten "
                "the prompt, or raise max_memory."
            )
        while count > 1 and bound(count * shortest) > room:
            count -= 1
        return count * shortest

    def least(self, end: int) -> int:
        """Bytes that the shortest step up to token ``end`` may need, as far as is known."""
        return self._bound(self._shortest, end)

    def _bound(self, tokens: int, end: int) -> int:
        if self._last is None:
            return 0
        then, then_end, took = self._last
        return int(took * (tokens / then) * max(1.0, end / then_end))

    @contextmanager
    def watch(self, tokens: int, end: int) -> Iterator[None]:
        """Around a step of ``tokens`` tokens up to ``end``."""
        if self._guard.ceiling is None:
            yield
            return
        self._gauges.reset_peak()
        before = self._gauges.active()
        yield
        if tokens >= self._shortest:
            self._last = (tokens, end, max(self._gauges.peak() - before, 1))
