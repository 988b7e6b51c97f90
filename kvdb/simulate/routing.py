"""Which machine of a fleet gets a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

# A router follows a prefix that is at least this share of the prompt (as SGLang's does), so that a
# system prompt which all have does not send everybody to one machine.
ENOUGH = 0.5


class Random:
    """Any machine."""

    def __init__(self, nodes: int, requests: int, seed: int) -> None:
        self._draws = iter(np.random.default_rng(seed).integers(nodes, size=requests).tolist())

    def choose(self, chain: Sequence[int], tokens: int) -> int:
        drawn: int = next(self._draws)
        return drawn


class TwoChoices:
    """Of two machines drawn the one that was given fewer prompt tokens so far."""

    def __init__(self, nodes: int, requests: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._pairs = iter(random.integers(nodes, size=(requests, 2)).tolist())
        self._given = [0] * nodes

    def choose(self, chain: Sequence[int], tokens: int) -> int:
        first, second = next(self._pairs)
        node: int = min(first, second, key=lambda node: (self._given[node], node))
        node = self.follow(chain, node)
        self._given[node] += tokens
        return node

    def follow(self, chain: Sequence[int], node: int) -> int:
        """The machine to take instead of the drawn ``node``."""
        raise NotImplementedError


class Sticky(TwoChoices):
    """A conversation stays where it began; a new one gets one of two machines.

    A trace does not name conversations: a prompt goes one on if it contains all blocks of an
    earlier prompt but that one's last, which was not full.
    """

    def __init__(self, nodes: int, requests: int, seed: int) -> None:
        super().__init__(nodes, requests, seed)
        self._ends: dict[int, int] = {}  # last full block of a prompt → its machine

    def follow(self, chain: Sequence[int], node: int) -> int:
        for block in reversed(chain[1:]):  # the root alone is no conversation
            if block in self._ends:
                node = self._ends[block]
                break
        if len(chain) > 2:
            self._ends[chain[-2]] = node
        return node


class Prefix(TwoChoices):
    """The machine that last had the longest beginning of the prompt, if that is half of it; else
    one of two. The router does not hear of evictions."""

    def __init__(self, nodes: int, requests: int, seed: int) -> None:
        super().__init__(nodes, requests, seed)
        self._last: dict[int, int] = {}

    def follow(self, chain: Sequence[int], node: int) -> int:
        for depth in range(len(chain) - 1, -1, -1):
            if depth + 1 < ENOUGH * len(chain):
                break
            if chain[depth] in self._last:
                node = self._last[chain[depth]]
                break
        self._last.update(dict.fromkeys(chain, node))
        return node


ROUTINGS: Mapping[str, Callable[[int, int, int], Random | TwoChoices]] = {
    "random": Random,
    "sticky": Sticky,
    "prefix": Prefix,
}
