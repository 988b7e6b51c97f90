"""State that is a pure function of its prefix, as a KV cache is: an oracle for what is read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvdb
from kvdb.layout import LayerSpec, Layout, PartSpec, TensorSpec
from kvdb.match import Namespace
from kvdb.store import Store
from kvdb.writer import Payload

BLOCK = 16


def kv_layer(dtype: str = "F32", heads: int = 2, dim: int = 4) -> LayerSpec:
    tensors = tuple(TensorSpec(name, dtype, (1, heads, dim), 2) for name in ("keys", "values"))
    return LayerSpec("KVCache", tensors)


def state_layer(width: int = 6) -> LayerSpec:
    return LayerSpec(
        "ArraysCache", (TensorSpec("state", "F32", (1, width), None),), "state", required=False
    )


LOGITS = TensorSpec("logits", "F32", (1, 11), None)
PLAIN = Layout((kv_layer(), kv_layer()), LOGITS)
# Groups of different kind, shape and dtype, an optional recurrent state, bfloat16 and packed ints.
MIXED = Layout(
    (
        kv_layer("BF16", heads=1, dim=8),
        state_layer(),
        kv_layer("BF16", heads=1, dim=8),
        LayerSpec(
            "QuantizedKVCache",
            (
                TensorSpec("keys", "U32", (1, 2, 3), 2),
                TensorSpec("scales", "F16", (1, 2, 1), 2),
            ),
            attributes=(("bits", 4), ("group_size", 32)),
        ),
    ),
    LOGITS,
)


def prefix_states(tokens: Sequence[int]) -> npt.NDArray[np.uint64]:
    """One number per position that depends on every token up to it."""
    states = np.empty(len(tokens), dtype=np.uint64)
    value = 7
    for position, token in enumerate(tokens):
        value = (value * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 64)
        states[position] = value
    return states


def part_arrays(
    spec: PartSpec, tokens: npt.NDArray[np.integer], start: int, end: int
) -> list[list[npt.NDArray[Any]]]:
    """The true arrays of a part for positions ``start`` … ``end`` of ``tokens``; not to be written
    to, as who asks again gets the same."""
    return _part_arrays(spec, tuple(tokens[:end].tolist()), start, end)


@lru_cache(1024)
def _part_arrays(
    spec: PartSpec, tokens: tuple[int, ...], start: int, end: int
) -> list[list[npt.NDArray[Any]]]:
    states = prefix_states(tokens)
    layers = []
    for layer in spec.layers:
        arrays = []
        for number, tensor in enumerate(spec.tensors):
            shape = tensor.full_shape(end - start)
            seed = np.uint64(layer * 31 + number * 7 + 1)
            index = np.arange(int(np.prod(shape)), dtype=np.uint64).reshape(shape)
            if tensor.token_axis is None:
                own = np.broadcast_to(states[-1], shape)
            else:
                # The value may depend on the place in the row, not on where the cut began.
                along = [1] * len(shape)
                along[tensor.token_axis] = end - start
                own = np.broadcast_to(states[start:end].reshape(along), shape)
                index = _row_numbers(tensor, end - start)
            with np.errstate(over="ignore"):
                mixed = own * np.uint64(2654435761) + index * np.uint64(40503) + seed
            width = tensor.numpy_dtype.itemsize * 8
            bits = (mixed >> np.uint64(64 - width)).astype(f"<u{width // 8}")
            made = bits.view(tensor.numpy_dtype).reshape(shape)
            made.setflags(write=False)
            arrays.append(made)
        layers.append(arrays)
    return layers


def _row_numbers(tensor: TensorSpec, tokens: int) -> npt.NDArray[np.uint64]:
    """A number per element that does not depend on the token."""
    assert tensor.token_axis is not None
    inner = np.arange(int(np.prod(tensor.shape)), dtype=np.uint64).reshape(tensor.shape)
    return np.repeat(np.expand_dims(inner, tensor.token_axis), tokens, axis=tensor.token_axis)


def part_bytes(
    spec: PartSpec, tokens: npt.NDArray[np.integer], start: int, end: int
) -> npt.NDArray[np.uint8]:
    return spec.pack(part_arrays(spec, tokens, start, end))


def payloads(
    namespace: Namespace,
    tokens: npt.NDArray[np.integer],
    first: int = 0,
    *,
    optional: bool = True,
) -> list[Payload]:
    """Payloads of all blocks from ``first`` on; optional parts go on the last block."""
    size = namespace.block_tokens
    blocks = range(first, -(-len(tokens) // size))
    made = []
    for block in blocks:
        start, end = block * size, min((block + 1) * size, len(tokens))
        parts = {
            spec.name: part_bytes(spec, tokens, start, end)
            for spec in namespace.layout.parts
            if spec.required or (optional and block == blocks[-1])
        }
        made.append(Payload(block, parts))
    return made


def buffers(layout: Layout, capacity: int) -> dict[str, list[list[npt.NDArray[Any]]]]:
    """Buffers for every token-cut part, filled with a pattern that no state has."""
    return {
        spec.name: [
            [
                np.full(
                    tensor.full_shape(capacity) if tensor.token_axis is not None else tensor.shape,
                    0x5A,
                    dtype=tensor.numpy_dtype,
                )
                for tensor in spec.tensors
            ]
            for _ in spec.layers
        ]
        for spec in layout.parts
        if spec.kind == "kv"
    }


def assert_true_state(
    layout: Layout,
    into: dict[str, list[list[npt.NDArray[Any]]]],
    tokens: npt.NDArray[np.integer],
    start: int,
    end: int,
) -> None:
    """Positions ``start`` … ``end`` of the buffers hold the bits that belong to ``tokens``."""
    for name, layers in into.items():
        spec = layout.by_name[name]
        want = part_arrays(spec, tokens, start, end)
        for got_layer, want_layer in zip(layers, want, strict=True):
            for got, true, tensor in zip(got_layer, want_layer, spec.tensors, strict=True):
                cut = np.take(got, range(start, end), axis=tensor.token_axis)
                assert cut.tobytes() == true.tobytes(), f"{name} differs in {start}…{end}"


def random_tokens(seed: int, count: int) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 5000, count, dtype=np.uint32)


def open_namespace(
    store: Store,
    layout: Layout = PLAIN,
    *,
    weights: str = "w",
    block_tokens: int = BLOCK,
    salt: bytes = b"",
) -> Namespace:
    identity = kvdb.ModelIdentity(weights, "c")
    return store.namespace(identity, layout, model=weights, block_tokens=block_tokens, salt=salt)


def put_all(store: Store, namespace: Namespace, tokens: npt.NDArray[np.integer]) -> None:
    result = store.put(namespace, tokens, payloads(namespace, tokens)).wait(30)
    assert result.dropped == 0, result


def check_prefix(store: Store, namespace: Namespace, tokens: npt.NDArray[np.integer]) -> int:
    """Match and read; everything that is said to be restored must be true. Returns its tokens."""
    match = store.match(namespace, tokens)
    into = buffers(namespace.layout, len(tokens) + 3)
    result = store.read(match, into)
    for block in match.blocks:
        if block.live and block.index not in result.bad:
            assert_true_state(namespace.layout, into, tokens, block.start, block.end)
    usable = match.live_prefix_tokens
    if result.bad:
        usable = min(usable, match.blocks[min(result.bad)].start)
    if usable == match.token_count and match.shared is not None and result.shared_ok:
        end = usable + match.shared.token_count
        assert_true_state(namespace.layout, into, tokens, usable, end)
        usable = end
    return usable


def shard_files(path: Path) -> list[Path]:
    return sorted((path / "shards").glob("??/*.safetensors"))
