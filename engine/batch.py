"""Decoding together: requests of like length share one forward, each keeps its own state.

mlx-lm's BatchGenerator is not used for it: it matches stop words from the seam on, draws from one
global random state, and copies a whole request to give a block of it out. Its cache classes are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from engine import batchkinds, mlxlm
from engine.logits import Logits, Row

# At most this share of a batch's tokens may be padding.
MAX_WASTE = 0.5
# Outliers, which no two of a batch are to each other: a quarter of the other's length or less.
MAX_RATIO = 4


class Seat:
    """The state of one running request: caches of its own, or a row of a batch.

    ``length`` is how many tokens it covers.
    """

    def __init__(self, caches: Sequence[Any], length: int) -> None:
        self.length = length
        self.batch: Batch | None = None
        self._own = list(caches)
        self._row = 0

    @property
    def caches(self) -> list[Any]:
        """Caches of this request alone: of a batch, views to be dropped before the next forward."""
        if self.batch is None:
            return self._own
        return [self.layer(index) for index in range(len(self.batch.layers))]

    def layer(self, index: int) -> Any:
        """One of the caches."""
        if self.batch is None:
            return self._own[index]
        return batchkinds.view(self.batch.layers[index], self._row, self.length)

    def enter(self, batch: Batch, row: int) -> None:
        """Be a row of a batch that has taken the state over; of one with no other row, own it."""
        self.batch, self._row, self._own = batch, row, []
        if len(batch.rows) == 1:
            self._own, self.batch = self.caches, None

    def give(self, index: int) -> None:
        """Let go of a layer whose state another batch has."""
        layers = self._own if self.batch is None else self.batch.layers
        layers[index] = None

    def leave(self) -> None:
        """Copy the state out of a batch that goes on without it, into caches of its own."""
        if self.batch is None:
            return
        alone = Batch([self])
        for index in range(len(self.batch.layers)):
            alone.take(index)
        self.enter(alone, 0)

    def lose(self) -> None:
        """Give the state up, wherever it is."""
        self.length, self.batch, self._own = 0, None, []

    def sit(self, caches: Sequence[Any], length: int) -> None:
        """Have another state, in caches of its own."""
        self.length, self.batch, self._own = length, None, list(caches)

    def forked(self) -> Seat:
        """The same state for another request; its memory is shared until one of them appends."""
        return Seat([batchkinds.share(cache) for cache in self.caches], self.length)

    @property
    def nbytes(self) -> int:
        """Memory of caches of its own; a batch counts for all of its rows."""
        return sum(0 if cache.empty() else cache.nbytes for cache in self._own)


class Batch:
    """Several requests' state, one batch cache a layer, in the order of ``rows``."""

    def __init__(self, rows: Sequence[Seat]) -> None:
        self.rows = tuple(rows)
        self.layers: list[Any] = []

    def take(self, index: int) -> None:
        """Copy the next layer from where it is now."""
        lengths = [row.length for row in self.rows]
        layer = batchkinds.join([row.layer(index) for row in self.rows], lengths)
        mlxlm.evaluate([layer])
        self.layers.append(layer)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def padded_nbytes(self) -> int:
        """Bytes that only make the rows equally long."""
        lengths = [row.length for row in self.rows]
        return sum(batchkinds.padding_bytes(layer, lengths) for layer in self.layers)


def partition(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of ``lengths`` in groups, longest first, such that at most MAX_WASTE of each is
    padding when every row is as long as the longest, and none in it is an outlier. Lengths count in
    the steps in which caches grow, so that a few tokens more or less make no difference."""
    steps = [length // mlxlm.GROWTH + 1 for length in lengths]
    groups: list[list[int]] = []
    longest = state = 0
    for index in sorted(range(len(steps)), key=lambda index: -steps[index]):
        size = steps[index]
        most = longest * (len(groups[-1]) + 1) if groups else 0
        if groups and size * MAX_RATIO > longest and state + size >= (1 - MAX_WASTE) * most:
            groups[-1].append(index)
            state += size
        else:
            groups.append([index])
            longest = state = size
    return groups


class Decoder:
    """The decode steps of one model.

    Groups last as long as the requests that decode are the same. When one comes or goes, the
    groups that change are copied, a layer at a time, so that no more than one is there twice.
    """

    def __init__(
        self,
        model: Callable[[mx.array, Sequence[Any]], mx.array],
        partition: Callable[[Sequence[int]], list[list[int]]] = partition,
    ) -> None:
        self._model = model
        self._partition = partition
        self._members: frozenset[Seat] = frozenset()
        self.groups: list[list[Seat]] = []

    def arrange(
        self, seats: Sequence[Seat], fits: Callable[[int], bool] = lambda padding: True
    ) -> None:
        """Group the requests that decode now; where their padding, in tokens, does not fit, each
        decodes alone. Who was among them before and is not any more must have ended, or have left
        its batch."""
        members = frozenset(seats)
        if members == self._members:
            return
        lengths = [seat.length for seat in seats]
        chosen = self._partition(lengths)
        if not fits(sum(_padding([lengths[index] for index in group]) for group in chosen)):
            chosen = [[index] for index in range(len(seats))]
        self.groups = [[seats[index] for index in group] for group in chosen]
        self._members = members
        batches = [Batch(group) for group in self.groups if not _stands(group)]
        if not batches:
            return
        for index in range(len(batches[0].rows[0].caches)):
            for batch in batches:
                batch.take(index)
            for batch in batches:
                for seat in batch.rows:
                    seat.give(index)
        for batch in batches:
            for row, seat in enumerate(batch.rows):
                seat.enter(batch, row)

    def forward(self, group: Sequence[Seat], tokens: Sequence[mx.array]) -> dict[Seat, Row]:
        """Put one token a request, each ``(1,)``, through the model: each one's logits, under way.
        ``group`` is one of the groups, or one that stands alone."""
        batch = group[0].batch
        layers = group[0].caches if batch is None else batch.layers
        logits = self._model(mx.concatenate(list(tokens))[:, None], layers)[:, -1, :]
        for seat in group:
            seat.length += 1
        mlxlm.start(logits)
        every = Logits(logits)
        return {seat: Row(every, index) for index, seat in enumerate(group)}

    @property
    def padded_nbytes(self) -> int:
        """Bytes that only make the rows of batches equally long."""
        return sum(group[0].batch.padded_nbytes for group in self.groups if group[0].batch)

    @property
    def nbytes(self) -> int:
        """Memory of all batches, padding included."""
        return sum(group[0].batch.nbytes for group in self.groups if group[0].batch)


def _padding(lengths: Sequence[int]) -> int:
    return max(lengths) * len(lengths) - sum(lengths)


def _stands(group: Sequence[Seat]) -> bool:
    """True where a group is already as it should be."""
    batch = group[0].batch
    return len(group) == 1 if batch is None else frozenset(group) == frozenset(batch.rows)
