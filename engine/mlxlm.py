"""Everything that leans on mlx-lm's inside: cache fields, model calls, code. mlx-lm is 0.32.*."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import inspect
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from engine.blas import Blas
from kvdb.errors import UsageError

# Caches grow in steps of this many tokens, so a restored one is made a multiple of it long.
GROWTH = 256


class CountingModel:
    """The model call, counting the tokens that really go through it, also for ``whole``."""

    def __init__(self, model: nn.Module, whole: CountingModel | None = None) -> None:
        self.model = model
        self.whole = whole
        self.forwarded = 0

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        self.forwarded += tokens.size
        if self.whole is not None:
            return self.whole(tokens, cache)
        logits: mx.array = self.model(tokens, cache=cache)
        return logits


def new_cache(model: nn.Module, kv_bits: int | None, kv_group_size: int) -> list[Any]:
    """The model's own empty caches, or their quantised form from token 0 on.

    Raises UsageError where a cache class of the model has no quantised form.
    """
    caches: list[Any] = make_prompt_cache(model)
    if kv_bits is None:
        return caches
    for cache in caches:
        if type(cache) is not KVCache:
            raise UsageError(f"kv_bits cannot be used: {type(cache).__name__} is not quantisable.")
    return [QuantizedKVCache(group_size=kv_group_size, bits=kv_bits) for _ in caches]


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches that hold arrays, with composite ones opened, in the order of the layers."""
    found: list[Any] = []
    for cache in caches:
        found += leaves(cache.caches) if type(cache) is CacheList else [cache]
    return found


def owners(caches: Sequence[Any]) -> list[int]:
    """For every leaf, the index of the cache in ``caches`` that it is or is part of."""
    return [index for index, cache in enumerate(caches) for _ in leaves([cache])]


Arrays = list[tuple[str, mx.array]]


def kv_arrays(cache: Any) -> Arrays:
    """The whole buffers, which may hold more tokens than are valid, in any order."""
    return [("keys", cache.keys), ("values", cache.values)]


def quantized_arrays(cache: QuantizedKVCache) -> Arrays:
    names = ("packed", "scales", "biases")
    return [
        (f"{which}.{name}", array)
        for which, triple in (("keys", cache.keys), ("values", cache.values))
        for name, array in zip(names, triple, strict=True)
    ]


def state_arrays(cache: ArraysCache) -> Arrays:
    return [(str(number), array) for number, array in enumerate(cache.cache)]


def plain_spans(cache: Any, start: int, end: int) -> list[slice]:
    """Where in the buffers tokens ``start`` to ``end`` lie."""
    return [slice(start, end)]


def rotating_spans(cache: RotatingKVCache, start: int, end: int) -> list[slice]:
    """After a chunk the tokens lie in order and end at ``_idx``; single tokens then go round."""
    length = cache.keys.shape[2]
    first = cache._idx - (cache.offset - start)
    last = first + end - start
    if first >= 0:
        return [slice(first, last)]
    if last <= 0:
        return [slice(first + length, last + length)]
    return [slice(first + length, length), slice(0, last)]


def chunked_spans(cache: ChunkedKVCache, start: int, end: int) -> list[slice]:
    return [slice(start - cache.start_position, end - cache.start_position)]


def load_kv(cache: KVCache, arrays: Sequence[mx.array], end: int) -> None:
    """Make ``arrays``, of which the first ``end`` tokens are valid, the buffers of a cache."""
    cache.keys, cache.values = arrays
    cache.offset = end


def load_quantized(cache: QuantizedKVCache, arrays: Sequence[mx.array], end: int) -> None:
    cache.keys, cache.values = tuple(arrays[:3]), tuple(arrays[3:])
    cache.offset = end


def load_concatenate(cache: ConcatenateKVCache, arrays: Sequence[mx.array], end: int) -> None:
    """This class has no spare room: its length is its number of tokens."""
    cache.keys, cache.values = (array[:, :, :end] for array in arrays) if end else (None, None)
    cache.offset = end


def load_rotating(cache: RotatingKVCache, arrays: Sequence[mx.array], end: int) -> None:
    """``arrays`` hold the last tokens before ``end``, a whole window of them if there are."""
    cache.keys, cache.values = arrays
    cache.offset, cache._idx = end, cache.keys.shape[2]


def load_chunked(cache: ChunkedKVCache, arrays: Sequence[mx.array], end: int) -> None:
    cache.keys, cache.values = arrays
    cache.offset, cache.start_position = end, end - cache.keys.shape[2]


def load_state(cache: ArraysCache, arrays: Sequence[mx.array], end: int) -> None:
    cache.cache = list(arrays)


def evaluate(leaf_caches: Sequence[Any], *more: mx.array) -> None:
    """Finish all pending work on caches without composite ones, and on ``more``."""
    mx.eval([cache.state for cache in leaf_caches], *more)


def start(*arrays: mx.array) -> None:
    """Begin computing ``arrays``; nothing waits for them here."""
    begin: Any = mx.async_eval
    begin(*arrays)


def scalar(array: mx.array) -> Any:
    """The one element of ``array`` as a Python number; waits for it."""
    return array.item()


def release_buffers() -> None:
    """Give freed buffers of a GPU back, between two steps. On a CPU they are used again."""
    if on_gpu():
        release_cache()


def release_cache() -> None:
    """Give all freed buffers back, from any thread."""
    _clear_cache()()


@functools.cache
def _clear_cache() -> Callable[[], object]:
    """MLX's ``clear_cache``, which may wait for the work of all threads. Its Python form holds the
    interpreter's lock meanwhile, which that work may need: two models would wait for ever."""
    for path in Path(mx.__file__).parent.glob("lib/libmlx.*"):
        with contextlib.suppress(OSError, AttributeError):
            clear = ctypes.CDLL(str(path))._ZN3mlx4core11clear_cacheEv
            clear.restype, clear.argtypes = None, []
            return clear
    return mx.clear_cache if on_gpu() else lambda: None


def release_thread() -> None:
    """Finish and give up this thread's streams. A process that ends with a stream of a thread that
    is gone is aborted by MLX."""
    mx.synchronize()
    mx.clear_streams()


def on_gpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def device_bytes() -> int:
    """Memory of the GPU in bytes; 0 where MLX does not say."""
    info = mx.device_info()
    return int(info.get("total_memory") or info.get("memory_size") or 0)


def host_memory() -> bool:
    """True where MLX arrays are plain memory, so that numpy can view them without a copy."""
    return not on_gpu() or bool(mx.metal.is_available())


def rope_attributes(layer: Any) -> tuple[tuple[str, str | int | float | bool | None], ...]:
    """The layer's rotary embedding as layout attributes: parameters where they are mlx's plain
    RoPE, else only that there is another one (the config digest covers what it is)."""
    if not isinstance(layer, nn.Module):
        return ()
    ropes = [module for name, module in layer.named_modules() if name.rsplit(".")[-1] == "rope"]
    if not ropes:
        return (("rope", None),)
    if type(ropes[0]) is not nn.RoPE:
        return (("rope", "other"),)
    rope = ropes[0]
    return (
        ("rope", "plain"),
        ("rope_dims", int(rope.dims)),
        ("rope_base", float(rope.base)),
        ("rope_scale", float(rope.scale)),
        ("rope_traditional", bool(rope.traditional)),
    )


def build_description(model: nn.Module, blas: Blas) -> dict[str, str | int | None]:
    """What computes here: code, versions, device, BLAS. Its digest names a build."""
    code = hashlib.sha256()
    for module in _model_modules(sys.modules.get(type(model).__module__)):
        code.update(module.__name__.encode() + b"\0")
        code.update(hashlib.sha256(Path(inspect.getfile(module)).read_bytes()).digest())
    return {
        "code": code.hexdigest(),
        "mlx": importlib.metadata.version("mlx"),
        "device": "gpu" if on_gpu() else "cpu",
        "hardware": _hardware(),
        "blas": blas.name,
        "blas_version": blas.version,
        "blas_core": blas.core,
        "blas_threads": blas.threads,
    }


def _hardware() -> str:
    """The GPU's name, else the processor architecture."""
    if on_gpu():
        return str(mx.device_info().get("device_name", "gpu"))
    return platform.machine()


def _model_modules(root: ModuleType | None) -> Iterator[ModuleType]:
    """The modules of ``mlx_lm.models`` that ``root`` reaches, sorted by name, cache always."""
    found: dict[str, ModuleType] = {}
    waiting = [module for module in (root, sys.modules.get("mlx_lm.models.cache")) if module]
    while waiting:
        module = waiting.pop()
        if module.__name__ in found:
            continue
        found[module.__name__] = module
        for value in vars(module).values():
            name = (
                value.__name__
                if isinstance(value, ModuleType)
                else getattr(value, "__module__", None)
            )
            if isinstance(name, str) and name.startswith("mlx_lm.models."):
                other = sys.modules.get(name)
                if other is not None:
                    waiting.append(other)
    return iter(sorted(found.values(), key=lambda module: module.__name__))
