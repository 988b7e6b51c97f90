"""mlx-lm's cache classes ↔ block parts. A new kind is one entry of ``KINDS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from engine import mlxlm
from kvdb.layout import LayerSpec, Layout, TensorSpec

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


@dataclass(frozen=True, slots=True)
class CacheKind:
    """How one cache class is cut and built: its tensors all have their tokens on axis 2.

    ``tensors`` gives the live, over-allocated buffers; ``build`` makes a cache around buffers,
    with its other settings taken from an empty template of the same class.
    """

    tensors: Callable[[Any], Sequence[tuple[str, mx.array]]]
    build: Callable[[Sequence[mx.array], Any], Any]
    attributes: Callable[[Any], Attributes]


KINDS: Mapping[type, CacheKind] = {
    KVCache: CacheKind(mlxlm.kv_tensors, mlxlm.build_kv, lambda cache: ()),
    QuantizedKVCache: CacheKind(
        mlxlm.quantized_tensors,
        mlxlm.build_quantized,
        lambda cache: (("bits", cache.bits), ("group_size", cache.group_size)),
    ),
}


class NotStorable(Exception):
    """The state of this model cannot be cut into blocks; the message says why. Internal."""


def derive_layout(model: mlxlm.CountingModel, caches: Sequence[Any]) -> Layout:
    """The layout of ``caches`` (empty ones, which this uses up), without computing anything.

    One forward is built but never evaluated: shapes and dtypes are known before values are.
    Raises NotStorable for a cache class without a kind, or for shapes that are not per token.
    """
    for cache in caches:
        if type(cache) not in KINDS:
            raise NotStorable(f"no way is known to cut a {type(cache).__name__}")
    logits = _unevaluated(model, caches)
    layers = list(getattr(model.model, "layers", ()))
    specs = []
    for index, cache in enumerate(caches):
        kind = KINDS[type(cache)]
        rope = mlxlm.rope_attributes(layers[index]) if len(layers) == len(caches) else ()
        tensors = tuple(_spec(name, array) for name, array in kind.tensors(cache))
        specs.append(
            LayerSpec(type(cache).__name__, tensors, "kv", True, kind.attributes(cache) + rope)
        )
    return Layout(tuple(specs), TensorSpec("logits", _dtype(logits), (logits.shape[-1],), None))


def vocabulary_size(model: mlxlm.CountingModel, caches: Sequence[Any]) -> int:
    """How many logits the model gives, without computing any; uses ``caches`` up."""
    return int(_unevaluated(model, caches).shape[-1])


def _unevaluated(model: mlxlm.CountingModel, caches: Sequence[Any]) -> mx.array:
    before = model.forwarded
    logits = model(mx.zeros((1, 1), dtype=mx.uint32), caches)
    model.forwarded = before
    return logits


def numpy_view(array: mx.array) -> npt.NDArray[Any]:
    """A numpy view of an evaluated array that shares its memory, bfloat16 as its bits.

    Drop it before the next forward: while it lives MLX copies the buffer instead of reusing it.
    """
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array, copy=False)


def cut(caches: Sequence[Any], layout: Layout, start: int, end: int) -> dict[str, Bytes]:
    """The bytes of tokens ``start`` to ``end`` of every kv part, each one contiguous fresh array.

    The copies never alias live state. Waits for pending work on ``caches``.
    """
    copy = _cut_host if mlxlm.host_memory() else _cut_device
    return {
        part.name: copy(caches, part.layers, part.tensors, start, end)
        for part in layout.parts
        if part.kind == "kv"
    }


def _cut_host(
    caches: Sequence[Any], layers: Sequence[int], specs: Sequence[TensorSpec], start: int, end: int
) -> Bytes:
    count = end - start
    out = np.empty(len(layers) * sum(spec.nbytes(count) for spec in specs), np.uint8)
    at = 0
    for layer in layers:
        cache = caches[layer]
        tensors = KINDS[type(cache)].tensors(cache)
        for spec, (_, array) in zip(specs, tensors, strict=True):
            nbytes = spec.nbytes(count)
            target = out[at : at + nbytes].view(spec.numpy_dtype).reshape(spec.full_shape(count))
            np.copyto(target, numpy_view(array)[:, :, start:end])
            at += nbytes
    return out


def _cut_device(
    caches: Sequence[Any], layers: Sequence[int], specs: Sequence[TensorSpec], start: int, end: int
) -> Bytes:
    """One transfer for all layers: they are joined on the device first."""
    pieces = [
        mx.contiguous(array[:, :, start:end]).view(mx.uint8).reshape(-1)
        for layer in layers
        for _, array in KINDS[type(caches[layer])].tensors(caches[layer])
    ]
    return np.array(mx.concatenate(pieces))


def _spec(name: str, array: mx.array | None) -> TensorSpec:
    if array is None:
        raise NotStorable(f"a layer leaves its {name} empty")
    if array.ndim != 4 or array.shape[0] != 1:
        raise NotStorable(f"{name} has the shape {tuple(array.shape)}")
    shape = tuple(size for axis, size in enumerate(array.shape) if axis != TOKEN_AXIS)
    return TensorSpec(name, _dtype(array), shape, TOKEN_AXIS)


def _dtype(array: mx.array) -> str:
    if array.dtype not in DTYPES:
        raise NotStorable(f"the dtype {array.dtype} has no stored form")
    return DTYPES[array.dtype]
