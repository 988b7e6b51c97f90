"""Caches of single requests ↔ batch caches, which hold one layer of several requests side by side,
left-padded to the longest. A new kind is one entry of ``KINDS``.

``view`` gives a row back as an ordinary cache over slices, so that it costs no copy; a batch of one
row, viewed, is an ordinary cache with memory of its own. The classes are mlx-lm's where it has one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from engine.mlxlm import GROWTH

Lengths = Sequence[int]


class BatchQuantizedKVCache:
    """mlx-lm's BatchKVCache for quantised state, which it lacks.

    ``keys`` and ``values`` are ``(packed, scales, biases)``, each ``(rows, heads, tokens, dim)``.
    """

    def __init__(self, group_size: int, bits: int, lengths: Lengths) -> None:
        longest = max(lengths)
        self.group_size, self.bits = group_size, bits
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.left_padding = mx.array([longest - length for length in lengths])
        self.offset = mx.array(list(lengths))
        self._idx = longest

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[list[mx.array], list[mx.array]]:
        begin, self._idx = self._idx, self._idx + keys.shape[2]
        self.offset = self.offset + keys.shape[2]
        for held, new in ((self.keys, keys), (self.values, values)):
            quantized = mx.quantize(new, group_size=self.group_size, bits=self.bits)
            for part, array in enumerate(quantized):
                held[part] = _room_for(held[part], self._idx)
                held[part][..., begin : self._idx, :] = array
        return (
            [array[..., : self._idx, :] for array in self.keys],
            [array[..., : self._idx, :] for array in self.values],
        )

    def make_mask(self, count: int, return_array: bool = False, **options: Any) -> mx.array:
        mask: mx.array = create_causal_mask(
            count, offset=self._idx, left_padding=self.left_padding, **options
        )
        return mask

    @property
    def state(self) -> tuple[Any, ...]:
        return self.keys, self.values, self.offset, self.left_padding

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.keys, *self.values))


@dataclass(frozen=True, slots=True)
class BatchKind:
    """How caches of one class are joined in a batch cache of class ``batch``, and a row is viewed.

    ``padding`` is how many bytes of a batch cache are padding. Lengths are tokens per row.
    """

    batch: type
    join: Callable[[Sequence[Any], Lengths], Any]
    view: Callable[[Any, int, int], Any]
    padding: Callable[[Any, Lengths], int]


def alone_reason(caches: Sequence[Any]) -> str | None:
    """Why the state in ``caches`` cannot share a forward with others', None where it can."""
    for cache in caches:
        if type(cache) is CacheList:
            if reason := alone_reason(cache.caches):
                return reason
        elif type(cache) not in KINDS:
            return f"{type(cache).__name__} has no batch form"
        elif getattr(cache, "keep", 0):
            return f"{type(cache).__name__} with keep > 0 has no batch form"
    return None


def join(caches: Sequence[Any], lengths: Lengths) -> Any:
    """A batch cache of one layer's caches, with room to append; not evaluated."""
    return KINDS[type(caches[0])].join(caches, lengths)


def view(batch: Any, row: int, length: int) -> Any:
    """A row of ``length`` tokens as an ordinary cache over slices. Drop it before the next
    forward: while it lives, MLX copies the whole batch to append to it."""
    return VIEWS[type(batch)].view(batch, row, length)


def padding_bytes(batch: Any, lengths: Lengths) -> int:
    """How much of a batch cache is there only to make its rows equally long."""
    return VIEWS[type(batch)].padding(batch, lengths)


def share(cache: Any) -> Any:
    """Another cache with the same state. Memory is shared until one of the two appends: MLX then
    copies it."""
    other = copy.copy(cache)
    for name, value in vars(cache).items():
        setattr(other, name, _shared(value))
    return other


def _shared(value: Any) -> Any:
    if isinstance(value, mx.array):
        return value[...]  # an object of its own: assigning into an array changes that object
    if isinstance(value, list | tuple):
        return type(value)(_shared(item) for item in value)
    return share(value) if hasattr(value, "state") else value


# -- full attention ---------------------------------------------------------------------------


def _join_kv(caches: Sequence[KVCache], lengths: Lengths) -> BatchKVCache:
    longest = max(lengths)
    batch = BatchKVCache([longest - length for length in lengths])
    batch.keys = _padded([cache.keys for cache in caches], lengths)
    batch.values = _padded([cache.values for cache in caches], lengths)
    batch.offset = mx.array(list(lengths))
    batch._idx = longest
    return batch


def _padded(arrays: Sequence[mx.array], lengths: Lengths) -> mx.array:
    """``(rows, heads, tokens, dim)``: each row's first tokens right-aligned, then room to append.
    (mlx-lm's own merge leaves none, and copies all of it at the next token.)"""
    longest = max(lengths)
    room = (longest // GROWTH + 1) * GROWTH
    _, heads, _, dim = arrays[0].shape
    out = mx.zeros((len(arrays), heads, room, dim), arrays[0].dtype)
    for row, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        out[row : row + 1, :, longest - length : longest] = array[..., :length, :]
    return out


def _room_for(array: mx.array, tokens: int) -> mx.array:
    if tokens <= array.shape[2]:
        return array
    rows, heads, _, dim = array.shape
    return mx.concatenate([array, mx.zeros((rows, heads, GROWTH, dim), array.dtype)], axis=2)


def _view_kv(batch: BatchKVCache, row: int, length: int) -> KVCache:
    begin = batch._idx - length
    cache = KVCache()
    cache.keys = batch.keys[row : row + 1, :, begin:]
    cache.values = batch.values[row : row + 1, :, begin:]
    cache.offset = length
    return cache


def _pad_kv(batch: Any, lengths: Lengths) -> int:
    return _part_of(batch, batch.keys, sum(batch._idx - length for length in lengths))


def _part_of(batch: Any, array: mx.array, tokens: int) -> int:
    rows, _, room, _ = array.shape
    return int(batch.nbytes * tokens // (rows * room))


# -- quantised --------------------------------------------------------------------------------


def _join_quantized(caches: Sequence[QuantizedKVCache], lengths: Lengths) -> BatchQuantizedKVCache:
    batch = BatchQuantizedKVCache(caches[0].group_size, caches[0].bits, lengths)
    batch.keys = [_padded([c.keys[part] for c in caches], lengths) for part in range(3)]
    batch.values = [_padded([c.values[part] for c in caches], lengths) for part in range(3)]
    return batch


def _view_quantized(batch: BatchQuantizedKVCache, row: int, length: int) -> QuantizedKVCache:
    begin = batch._idx - length
    cache = QuantizedKVCache(group_size=batch.group_size, bits=batch.bits)
    cache.keys = tuple(array[row : row + 1, :, begin:] for array in batch.keys)
    cache.values = tuple(array[row : row + 1, :, begin:] for array in batch.values)
    cache.offset = length
    return cache


def _pad_quantized(batch: BatchQuantizedKVCache, lengths: Lengths) -> int:
    return _part_of(batch, batch.keys[0], sum(batch._idx - length for length in lengths))


# -- sliding windows --------------------------------------------------------------------------


def _join_rotating(caches: Sequence[RotatingKVCache], lengths: Lengths) -> BatchRotatingKVCache:
    return BatchRotatingKVCache.merge(caches)


def _view_rotating(batch: BatchRotatingKVCache, row: int, length: int) -> RotatingKVCache:
    keys, values, end = batch.keys[row : row + 1], batch.values[row : row + 1], batch._idx
    if batch.rotated:
        keys, values = _rolled(keys, -batch._idx), _rolled(values, -batch._idx)
        end = batch.max_size
    begin = end - min(length, _filled(batch))
    cache = RotatingKVCache(batch.max_size)
    cache.keys, cache.values = keys[:, :, begin:end], values[:, :, begin:end]
    cache.offset, cache._idx = length, end - begin
    return cache


def _rolled(array: mx.array, shift: int) -> mx.array:
    roll: Any = mx.roll
    rolled: mx.array = roll(array, shift, axis=2)
    return rolled


def _filled(batch: BatchRotatingKVCache) -> int:
    return int(min(batch._offset, batch.max_size))


def _pad_rotating(batch: BatchRotatingKVCache, lengths: Lengths) -> int:
    filled = _filled(batch)
    return _part_of(batch, batch.keys, sum(filled - min(length, filled) for length in lengths))


# -- recurrent and composite ------------------------------------------------------------------


def _join_arrays(caches: Sequence[ArraysCache], lengths: Lengths) -> ArraysCache:
    return ArraysCache.merge(caches)


def _view_arrays(batch: ArraysCache, row: int, length: int) -> ArraysCache:
    cache = ArraysCache(len(batch.cache))
    cache.cache = [None if array is None else array[row : row + 1] for array in batch.cache]
    return cache


def _join_list(caches: Sequence[CacheList], lengths: Lengths) -> CacheList:
    columns = zip(*(cache.caches for cache in caches), strict=True)
    return CacheList(*(join(column, lengths) for column in columns))


def _view_list(batch: CacheList, row: int, length: int) -> CacheList:
    return CacheList(*(view(inner, row, length) for inner in batch.caches))


def _pad_list(batch: CacheList, lengths: Lengths) -> int:
    return sum(padding_bytes(inner, lengths) for inner in batch.caches)


KINDS: Mapping[type, BatchKind] = {
    KVCache: BatchKind(BatchKVCache, _join_kv, _view_kv, _pad_kv),
    QuantizedKVCache: BatchKind(
        BatchQuantizedKVCache, _join_quantized, _view_quantized, _pad_quantized
    ),
    RotatingKVCache: BatchKind(BatchRotatingKVCache, _join_rotating, _view_rotating, _pad_rotating),
    ArraysCache: BatchKind(ArraysCache, _join_arrays, _view_arrays, lambda batch, lengths: 0),
    CacheList: BatchKind(CacheList, _join_list, _view_list, _pad_list),
}
VIEWS: Mapping[type, BatchKind] = {kind.batch: kind for kind in KINDS.values()}
