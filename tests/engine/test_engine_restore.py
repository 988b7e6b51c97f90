"""Buffers: the store writes into MLX's own memory, and what it wrote is the cache's state."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from engine.memory import unwritten
from engine.mlxlm import GROWTH
from engine.restore import (
    MAX_HEADROOM,
    Buffers,
    capacity_for,
    logits_array,
    logits_bytes,
)
from kvdb.layout import LayerSpec, Layout, TensorSpec

HALF = tuple(TensorSpec(name, "BF16", (1, 2, 8), 2) for name in ("keys", "values"))
WIDE = tuple(TensorSpec(name, "F32", (1, 2, 8), 2) for name in ("keys", "values"))
PACKED = tuple(
    TensorSpec(f"{which}.{name}", dtype, (1, 2, width), 2)
    for which in ("keys", "values")
    for name, dtype, width in (("packed", "U32", 8), ("scales", "F32", 1), ("biases", "F32", 1))
)


@pytest.mark.parametrize(
    ("specs", "template"),
    [(WIDE, KVCache()), (HALF, KVCache()), (PACKED, QuantizedKVCache(32, 8))],
)
def test_what_is_written_into_the_views_is_cut_out_again(
    specs: tuple[TensorSpec, ...], template: Any
) -> None:
    layout = Layout((LayerSpec("a", specs), LayerSpec("b", specs), LayerSpec("a", specs)))
    assert [part.layers for part in layout.parts] == [(0, 2), (1,)]
    buffers = Buffers(layout, 256)
    rng = np.random.default_rng(0)
    written = {}
    for part in layout.parts:
        raw = rng.integers(0, 256, part.nbytes(100), dtype=np.uint8)
        written[part.name] = raw
        at = 0
        for layer in buffers.into[part.name]:
            for spec, array in zip(part.tensors, layer, strict=True):
                assert array.shape == spec.full_shape(256)
                assert array.dtype == spec.numpy_dtype
                piece = raw[at : at + spec.nbytes(100)]
                array[:, :, :100] = piece.view(spec.numpy_dtype).reshape(spec.full_shape(100))
                at += len(piece)
    live = buffers.live([copy.copy(template) for _ in range(3)])
    live.seek(100)
    assert [cache.offset for cache in live.caches] == [100] * 3
    for part in layout.parts:
        assert np.array_equal(live.cut(part, 0, 100), written[part.name])


def test_appending_to_a_restored_cache_keeps_its_memory() -> None:
    """With headroom and no view left, an append works in place: no copy of the whole state."""
    layout = Layout((LayerSpec("KVCache", WIDE),))
    buffers = Buffers(layout, 512)
    for array in buffers.into["kv:0"][0]:
        array[:] = 1
    address = buffers.into["kv:0"][0][0].ctypes.data
    live = buffers.live([KVCache()])
    live.seek(300)
    (cache,) = live.caches
    del array
    for _ in range(3):
        keys, values = cache.update_and_fetch(mx.zeros((1, 2, 1, 8)), mx.zeros((1, 2, 1, 8)))
        mx.eval(keys, values)
        del keys, values
    assert cache.offset == 303
    assert np.array(cache.keys, copy=False).ctypes.data == address


def test_unwritten_arrays_are_apart() -> None:
    arrays = unwritten([*WIDE, *HALF, *PACKED], 64)
    for number, array in enumerate(arrays):
        bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        np.array(bits, copy=False)[...] = number
    for number, array in enumerate(arrays):
        bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        assert np.array(bits).min() == np.array(bits).max() == number


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_logits_keep_their_bits(dtype: mx.Dtype) -> None:
    logits = mx.random.normal((1, 50)).astype(dtype)
    name = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}[dtype]
    again = logits_array(logits_bytes(logits), TensorSpec("logits", name, (50,), None))
    assert again.dtype == dtype
    assert again.shape == (1, 50)
    assert mx.array_equal(again, logits).item()


def test_capacity_has_headroom_in_whole_steps() -> None:
    for prompt in (1, 255, 256, 257, 1000):
        for room in (1, 10, 10_000):
            capacity = capacity_for(prompt, room)
            assert capacity % GROWTH == 0
            assert prompt < capacity <= prompt + MAX_HEADROOM + GROWTH
