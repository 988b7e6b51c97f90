"""The live state of one sequence: its caches, where they stand, and cuts out of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from engine import mlxlm
from engine.batch import Seat
from engine.cachekinds import TOKEN_AXIS, Bytes, kind_of, numpy_view
from kvdb.layout import Layout, PartSpec


class LiveState:
    """``caches`` go into the model, those of ``seat``; only this class moves them. Without a layout
    (their class has no kind) they can neither be placed nor cut. ``download`` brings a flat uint8
    array from a device without shared host memory.

    All methods run on the MLX thread. Cuts wait for pending work and never alias live state.
    """

    def __init__(
        self,
        layout: Layout | None,
        caches: Sequence[Any],
        download: Callable[[mx.array], Bytes] = np.array,
    ) -> None:
        self._download = download
        self.seat = Seat(caches, 0)
        self.parts = () if layout is None else layout.parts
        self._layers = () if layout is None else layout.layers
        self._kinds = [] if layout is None else [kind_of(leaf) for leaf in mlxlm.leaves(caches)]
        # Of classes without spare room: buffers with what is restored behind their end.
        self._behind: dict[int, Sequence[mx.array]] = {}

    def fill(self, full: Mapping[int, Sequence[mx.array]]) -> None:
        """Give layers of full attention (by number) their buffers, as yet without valid tokens."""
        leaves = self._leaves
        for layer, arrays in full.items():
            if not self._kinds[layer].seekable:
                self._behind[layer] = arrays
            self._kinds[layer].load(leaves[layer], arrays, 0)

    def clear(self, spans: Iterable[tuple[int, int]]) -> None:
        """Zero tokens of full attention that nothing was read for and that stay masked: in memory
        nobody wrote may be NaNs, which a weight of zero does not take away."""
        leaves = self._leaves
        for layer in self._full_layers():
            for _, array in self._kinds[layer].arrays(leaves[layer]):
                for start, end in spans:
                    array[:, :, start:end] = 0

    def seek(self, position: int) -> None:
        """Make ``position`` the number of valid tokens of full attention; what lies behind it in
        the buffers stays."""
        leaves = self._leaves
        for layer in self._full_layers():
            cache = leaves[layer]
            if cache.offset == position:
                continue
            if layer in self._behind:
                for buffer, (_, array) in zip(
                    self._behind[layer], self._kinds[layer].arrays(cache), strict=True
                ):
                    if array is not None:
                        buffer[:, :, : cache.offset] = array[:, :, : cache.offset]
                self._kinds[layer].load(cache, self._behind[layer], position)
            else:
                cache.offset = position

    def place(
        self,
        position: int,
        windows: Mapping[int, tuple[int, Sequence[mx.array]]],
        states: Mapping[int, Sequence[mx.array]],
    ) -> None:
        """Let sliding and recurrent layers (by number) go on at ``position``.

        ``windows`` are a layer's stored tokens up to there with the number of the first; what a
        window reaches before it comes from the live cache.
        """
        leaves = self._leaves
        for layer, (first, arrays) in windows.items():
            since = max(0, position - (self._layers[layer].window or position))
            if first > since:
                live = self._slices(leaves[layer], layer, since, first)
                joined = [
                    mx.concatenate([a, b[:, :, : position - first]], axis=TOKEN_AXIS)
                    for a, b in zip(live, arrays, strict=True)
                ]
            else:
                joined = [a[:, :, since - first : position - first] for a in arrays]
            # A copy: a slice would keep whole blocks alive, and forbid writing in place.
            own = [mx.contiguous(array, allow_col_major=False) for array in joined]
            self._kinds[layer].load(leaves[layer], own, position)
        for layer, arrays in states.items():
            self._kinds[layer].load(leaves[layer], arrays, position)

    def cut(self, part: PartSpec, start: int, end: int) -> Bytes:
        """The bytes of tokens ``start`` to ``end`` of a part, or of the state behind all tokens:
        one contiguous fresh array. Sliding layers hold what the last forward and the window
        before it cover."""
        return (
            self._cut_host(part, start, end)
            if mlxlm.host_memory()
            else self._cut_device(part, start, end)
        )

    def evaluate(self, *more: mx.array) -> None:
        """Finish all pending work, also on ``more``."""
        mlxlm.evaluate(self._leaves, *more)

    def forked(self) -> LiveState:
        """The same state for another sequence, behind the whole prompt. Memory is shared until one
        of the two appends."""
        other = copy.copy(self)
        other.seat = self.seat.forked()
        return other

    @property
    def caches(self) -> list[Any]:
        """What goes into the model. In a batch these are views: drop them before the next
        forward."""
        return self.seat.caches

    @property
    def _leaves(self) -> list[Any]:
        return mlxlm.leaves(self.caches)

    def _full_layers(self) -> list[int]:
        return [layer for part in self.parts if part.sees_all for layer in part.layers]

    def _slices(self, cache: Any, layer: int, start: int, end: int) -> list[mx.array]:
        """Tokens ``start`` to ``end`` of a layer's cache, in order, as lazy arrays."""
        kind = self._kinds[layer]
        spans = kind.spans(cache, start, end)
        return [
            mx.concatenate([array[:, :, span] for span in spans], axis=TOKEN_AXIS)
            if len(spans) > 1
            else array[:, :, spans[0]]
            for _, array in kind.arrays(cache)
        ]

    def _cut_host(self, part: PartSpec, start: int, end: int) -> Bytes:
        count = end - start
        out = np.empty(part.nbytes(count), np.uint8)
        at = 0
        leaves = self._leaves
        for layer in part.layers:
            cache, kind = leaves[layer], self._kinds[layer]
            spans = [] if part.kind == "state" else kind.spans(cache, start, end)
            for spec, (_, array) in zip(part.tensors, kind.arrays(cache), strict=True):
                nbytes = spec.nbytes(count)
                target = out[at : at + nbytes].view(spec.numpy_dtype)
                target = target.reshape(spec.full_shape(count))
                view = numpy_view(array)
                if part.kind == "state":
                    np.copyto(target, view)
                done = 0
                for span in spans:
                    length = span.stop - span.start
                    np.copyto(target[:, :, done : done + length], view[:, :, span])
                    done += length
                at += nbytes
        return out

    def _cut_device(self, part: PartSpec, start: int, end: int) -> Bytes:
        """One transfer for all layers: they are joined on the device first."""
        leaves = self._leaves
        pieces = [
            mx.contiguous(array).view(mx.uint8).reshape(-1)
            for layer in part.layers
            for array in (
                [array for _, array in self._kinds[layer].arrays(leaves[layer])]
                if part.kind == "state"
                else self._slices(leaves[layer], layer, start, end)
            )
        ]
        return self._download(mx.concatenate(pieces))
