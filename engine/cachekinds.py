"""mlx-lm's cache classes ↔ block parts. A new kind is one entry of ``KINDS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from engine import mlxlm
from engine.masking import MaskedKVCache, MaskedQuantizedKVCache
from engine.plan import Needs
from kvdb.layout import TOKEN_MARK, LayerSpec, Layout, PartKind, TensorSpec

Bytes = npt.NDArray[np.uint8]
Attributes = tuple[tuple[str, str | int | float | bool | None], ...]

DTYPES: Mapping[mx.Dtype, str] = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.uint8: "U8",
}
MLX_DTYPES: Mapping[str, mx.Dtype] = {name: dtype for dtype, name in DTYPES.items()}
TOKEN_AXIS = 2


class NotStorable(Exception):
    """The state of this model cannot be cut into blocks; the message says why. Internal."""


@dataclass(frozen=True, slots=True)
class CacheKind:
    """How one cache class is cut and filled.

    ``arrays`` are its live buffers by name. ``spans`` says where in them, on axis 2, given tokens
    lie. ``load`` fills an empty cache up to a token; the arrays of a class with a ``window`` hold
    just the last tokens before it, those of a state all there is. Buffers of a ``seekable`` class
    may hold valid tokens behind its end. ``attributes`` tells equal shapes of other meaning apart.
    """

    arrays: Callable[[Any], Sequence[tuple[str, mx.array]]]
    load: Callable[[Any, Sequence[mx.array], int], None]
    spans: Callable[[Any, int, int], list[slice]] = mlxlm.plain_spans
    part: PartKind = "kv"
    seekable: bool = True
    attributes: Callable[[Any], Attributes] = lambda cache: ()


def _window(cache: RotatingKVCache) -> Attributes:
    if cache.keep:
        # The first tokens stay and others go: what is held then depends on more than the prefix.
        raise NotStorable("a RotatingKVCache that keeps its first tokens")
    return (("window", int(cache.max_size)),)


# Also the allow-list of classes: what is not here is neither cut nor made.
KINDS: Mapping[type, CacheKind] = {
    KVCache: CacheKind(mlxlm.kv_arrays, mlxlm.load_kv),
    MaskedKVCache: CacheKind(mlxlm.kv_arrays, mlxlm.load_kv),
    ConcatenateKVCache: CacheKind(mlxlm.kv_arrays, mlxlm.load_concatenate, seekable=False),
    QuantizedKVCache: CacheKind(
        mlxlm.quantized_arrays,
        mlxlm.load_quantized,
        attributes=lambda cache: (("bits", cache.bits), ("group_size", cache.group_size)),
    ),
    MaskedQuantizedKVCache: CacheKind(mlxlm.quantized_arrays, mlxlm.load_quantized),
    RotatingKVCache: CacheKind(
        mlxlm.kv_arrays, mlxlm.load_rotating, mlxlm.rotating_spans, attributes=_window
    ),
    # A token sees no chunk but its own, and never further than a chunk's length.
    ChunkedKVCache: CacheKind(
        mlxlm.kv_arrays,
        mlxlm.load_chunked,
        mlxlm.chunked_spans,
        attributes=lambda cache: (("window", int(cache.chunk_size)),),
    ),
    ArraysCache: CacheKind(mlxlm.state_arrays, mlxlm.load_state, part="state"),
}


def kind_of(cache: Any) -> CacheKind:
    """The kind of a cache that is not composite; NotStorable if there is none."""
    kind = KINDS.get(type(cache))
    if kind is None:
        raise NotStorable(f"no way is known to cut a {type(cache).__name__}")
    return kind


def derive_layout(
    model: mlxlm.CountingModel, new_caches: Callable[[], Sequence[Any]]
) -> tuple[Layout | None, NotStorable | None, int]:
    """The layout of a model's caches, or why it has none, and how many logits it gives.

    Forwards of one and of two tokens are built but never evaluated: shapes and dtypes are known
    before values are, and what changes between the two is the token axis.
    """
    caches = new_caches()
    logits = _unevaluated(model, caches, 1)
    vocabulary = int(logits.shape[-1])
    try:
        one = _layers(model, caches)
        other = new_caches()
        _unevaluated(model, other, 2)
        if _layers(model, other) != one:
            raise NotStorable("the shape of its state changes with the number of tokens")
        layers = one if any(_is_full(layer) for layer in one) else (*one, TOKEN_MARK)
        spec = TensorSpec("logits", _dtype(logits), (vocabulary,), None)
        return Layout(layers, spec), None, vocabulary
    except NotStorable as reason:
        return None, reason, vocabulary


def needs(layout: Layout) -> Needs:
    """What a plan must know of a layout."""
    return Needs(tuple(layout.windows.items()), layout.states)


def _is_full(layer: LayerSpec) -> bool:
    return layer.part_kind == "kv" and layer.window is None


def _layers(model: mlxlm.CountingModel, caches: Sequence[Any]) -> tuple[LayerSpec, ...]:
    blocks = list(getattr(model.model, "layers", ()))
    specs: list[LayerSpec] = []
    for owner, cache in zip(mlxlm.owners(caches), mlxlm.leaves(caches), strict=True):
        kind = kind_of(cache)
        tensors = tuple(_spec(kind, name, array) for name, array in kind.arrays(cache))
        attributes = kind.attributes(cache)
        if kind.part == "kv" and len(blocks) == len(caches):
            attributes += mlxlm.rope_attributes(blocks[owner])
        layer = LayerSpec(type(cache).__name__, tensors, kind.part, True, attributes)
        if not _is_full(layer):
            layer = LayerSpec(layer.kind, tensors, kind.part, False, attributes)
        specs.append(layer)
    if not specs:
        raise NotStorable("it has no caches")
    return tuple(specs)


def _unevaluated(model: mlxlm.CountingModel, caches: Sequence[Any], tokens: int) -> mx.array:
    before = model.forwarded
    logits = model(mx.zeros((1, tokens), dtype=mx.uint32), caches)
    model.forwarded = before
    return logits


def _spec(kind: CacheKind, name: str, array: mx.array | None) -> TensorSpec:
    if array is None:
        raise NotStorable(f"a layer leaves its {name} empty")
    if kind.part == "state":
        if array.ndim < 1 or array.shape[0] != 1:
            raise NotStorable(f"{name} has the shape {tuple(array.shape)}")
        return TensorSpec(name, _dtype(array), tuple(array.shape), None)
    if array.ndim != 4 or array.shape[0] != 1:
        raise NotStorable(f"{name} has the shape {tuple(array.shape)}")
    shape = tuple(size for axis, size in enumerate(array.shape) if axis != TOKEN_AXIS)
    return TensorSpec(name, _dtype(array), shape, TOKEN_AXIS)


def _dtype(array: mx.array) -> str:
    if array.dtype not in DTYPES:
        raise NotStorable(f"the dtype {array.dtype} has no stored form")
    return DTYPES[array.dtype]


def numpy_view(array: mx.array) -> npt.NDArray[Any]:
    """A numpy view of an evaluated array that shares its memory, bfloat16 as its bits.

    Drop it before the next forward: while it lives MLX copies the buffer instead of reusing it.
    """
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array, copy=False)
