"""Caches with holes: blocks whose state is gone are left out of attention, positions stay.

A masked cache is mlx-lm's own with another ``make_mask``; the holes' rows stay in its buffers as
zeros, so that every later token keeps its place and its rotary position. What is computed over one
is an approximation: it is never stored (engine/generation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from engine import mlxlm

Spans = tuple[tuple[int, int], ...]


class _Masked:
    """``holes`` are ``(first token, end)``; no token attends to one in them."""

    offset: int
    holes: Spans = ()

    def make_mask(self, count: int, return_array: bool = False, **options: Any) -> mx.array:
        mask: mx.array = create_causal_mask(count, self.offset, **options)
        for start, end in self.holes:
            mask[:, start:end] = False
        return mask


class MaskedKVCache(_Masked, KVCache):  # type: ignore[misc]  # mlx-lm has no types
    pass


class MaskedQuantizedKVCache(_Masked, QuantizedKVCache):  # type: ignore[misc]
    pass


def masked(caches: Sequence[Any], holes: Spans) -> list[Any]:
    """Empty caches as ``caches``, which are of the classes that :func:`refusal` lets pass, with
    ``holes``."""
    made = [
        MaskedQuantizedKVCache(group_size=cache.group_size, bits=cache.bits)
        if type(cache) is QuantizedKVCache
        else MaskedKVCache()
        for cache in caches
    ]
    for cache in made:
        cache.holes = holes
    return made


def refusal(
    model: Callable[[mx.array, Sequence[Any]], mx.array], caches: Callable[[], Sequence[Any]]
) -> str | None:
    """Why nothing can be masked in the state of ``model``, None if it can.

    A sliding window or a recurrent state is not made of single tokens' parts that could be left
    out. Whether the model asks its caches for a mask at all is tried: what token 0 was must make no
    difference once it is masked.
    """
    for cache in caches():
        if type(cache) not in (KVCache, QuantizedKVCache):
            return f"nothing can be masked in a {type(cache).__name__}"
    seen: list[mx.array] = []
    for token in (0, 1):
        made = masked(caches(), ())
        model(mx.array([[token]]), made)
        for cache in made:
            cache.holes = ((0, 1),)
        # Several tokens and single ones may take different ways.
        seen.append(mx.concatenate([model(mx.array(ids), made) for ids in ([[0, 0]], [[0]])], 1))
    if not mlxlm.scalar(mx.array_equal(seen[0], seen[1])):
        return "the model asks its caches for no mask"
    return None
