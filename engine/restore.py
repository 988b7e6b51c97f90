"""Parts → live caches: buffers with headroom that the store reads into, then caches around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine import mlxlm
from engine.cachekinds import KINDS, numpy_view
from engine.memory import unwritten
from kvdb.layout import Layout, TensorSpec

# Room for this many generated tokens at most; beyond it caches grow as mlx-lm's do. More would be
# zeroed for every request, though most end sooner.
MAX_HEADROOM = mlxlm.GROWTH


def capacity_for(prompt: int, max_tokens: int) -> int:
    """Tokens to allocate: an exactly full cache would be copied whole at its first append."""
    wanted = prompt + min(max_tokens, MAX_HEADROOM)
    return -(-wanted // mlxlm.GROWTH) * mlxlm.GROWTH


class Buffers:
    """Memory for ``capacity`` tokens of every layer.

    On a CPU and in unified memory ``into`` are views of MLX's own memory, so that the store's
    ``preadv`` lands in its final place. Elsewhere they are host arrays, moved by :meth:`caches`.
    """

    def __init__(self, layout: Layout, capacity: int) -> None:
        self._layout = layout
        self._arrays: list[list[mx.array]] = []
        self.into: dict[str, list[list[npt.NDArray[Any]]]] = {}
        shared = mlxlm.host_memory()
        if shared:
            arrays = iter(
                unwritten([spec for layer in layout.layers for spec in layer.tensors], capacity)
            )
            self._arrays = [[next(arrays) for _ in layer.tensors] for layer in layout.layers]
        for part in layout.parts:
            if part.kind == "kv":
                self.into[part.name] = [
                    [numpy_view(array) for array in self._arrays[layer]]
                    if shared
                    else [
                        np.zeros(spec.full_shape(capacity), spec.numpy_dtype)
                        for spec in part.tensors
                    ]
                    for layer in part.layers
                ]

    def caches(self, templates: Sequence[Any], offset: int) -> list[Any]:
        """Live caches over this memory with ``offset`` valid tokens. The views are dropped, since
        MLX would copy a buffer that is still viewed; call it once."""
        if not self._arrays:
            self._arrays = self._moved()
        self.into = {}
        caches = [
            KINDS[type(template)].build(arrays, template)
            for template, arrays in zip(templates, self._arrays, strict=True)
        ]
        self._arrays = []
        mlxlm.set_offset(caches, offset)
        return caches

    def _moved(self) -> list[list[mx.array]]:
        arrays: dict[int, list[mx.array]] = {}
        for part in self._layout.parts:
            if part.kind == "kv":
                for layer, tensors in zip(part.layers, self.into[part.name], strict=True):
                    arrays[layer] = [
                        to_mlx(array, spec.dtype)
                        for array, spec in zip(tensors, part.tensors, strict=True)
                    ]
        return [arrays[layer] for layer in range(len(self._layout.layers))]


def to_mlx(array: npt.NDArray[Any], dtype: str) -> mx.array:
    """A copy in MLX's memory; bfloat16 comes as its bits."""
    moved = mx.array(array)
    return moved.view(mx.bfloat16) if dtype == "BF16" else moved


def logits_array(raw: npt.NDArray[np.uint8], spec: TensorSpec) -> mx.array:
    """Stored logits as the model gave them: ``(1, vocabulary)`` in its dtype."""
    return to_mlx(raw.view(spec.numpy_dtype).reshape(1, -1), spec.dtype)


def logits_bytes(logits: mx.array) -> npt.NDArray[np.uint8]:
    """A copy of the bytes of raw logits ``(1, vocabulary)``, the inverse of logits_array."""
    raw = np.array(logits.view(mx.uint16) if logits.dtype == mx.bfloat16 else logits)
    return raw.reshape(-1).view(np.uint8)
