"""Restore (match → read → verified → live MLX caches, codec raw) against readinto of the same
bytes into fresh buffers, and in a fresh process against mlx-lm's load_prompt_cache of the same
state.

    python -m tests.bench.restore_speed [--tokens 4096] [--rounds 9]

State of SmolLM2's shape in float32. Page cache warm for all; interleaved; the spread is that of
plain readinto against itself. Ratios of processor time are given beside those of wall time: on a
machine that others use they tell more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvdb
from engine.blas import preload
from kvdb.layout import LayerSpec, Layout, TensorSpec
from kvdb.writer import Payload

LAYERS, HEADS, DIM = 30, 3, 64
TENSORS = tuple(TensorSpec(n, "F32", (1, HEADS, DIM), 2) for n in ("keys", "values"))
LAYOUT = Layout((LayerSpec("KVCache", TENSORS),) * LAYERS)


def fill(path: Path, tokens: np.ndarray, codec: str = "raw", values: int = 256) -> None:
    random = np.random.default_rng(0)
    with kvdb.open(path, codec=codec) as store:
        namespace = store.namespace(kvdb.ModelIdentity("bench", "bench"), LAYOUT)
        spec = LAYOUT.by_name["kv:0"]
        size = namespace.block_tokens
        for end in range(size, len(tokens) + 1, size):
            raw = random.integers(0, values, spec.nbytes(size), dtype=np.uint8)
            payload = Payload(end // size - 1, {"kv:0": raw})
            store.put(namespace, tokens[:end], [payload]).wait()


def plain(files: list[Path]) -> list[np.ndarray]:
    """readinto of whole files into fresh buffers, all kept: freed ones would be used again, and
    cost no page faults."""
    buffers = [np.empty(file.stat().st_size, dtype=np.uint8) for file in files]
    for file, buffer in zip(files, buffers, strict=True):
        with file.open("rb", buffering=0) as handle:
            handle.readinto(buffer)
    return buffers


def restore(store: kvdb.Store, tokens: np.ndarray) -> Any:
    """Live caches of all tokens, evaluated; what the read took."""
    from mlx_lm.models.cache import KVCache

    from engine.restore import Buffers, capacity_for

    match = store.match(store.namespaces()[0], tokens)
    buffers = Buffers(LAYOUT, capacity_for(len(tokens), 256))
    result = store.read(match, buffers.into)
    assert not result.bad
    live = buffers.live([KVCache() for _ in range(LAYERS)])
    live.seek(len(tokens))
    live.evaluate()
    return result, live


class Clock:
    """Wall and processor seconds of what was timed, by name."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def time(self, name: str, call: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        self.wall.setdefault(name, []).append(time.perf_counter() - wall)
        self.cpu.setdefault(name, []).append(time.process_time() - cpu)
        del result  # given back outside of the time

    def ratio(self, floor: list[str], name: str) -> dict[str, float]:
        return {
            kind: round(
                statistics.median([t for f in floor for t in times[f]])
                / statistics.median(times[name]),
                2,
            )
            for kind, times in (("wall", self.wall), ("cpu", self.cpu))
        }


def in_this_process(path: Path, tokens: np.ndarray, rounds: int) -> dict[str, Any]:
    files = sorted((path / "shards").glob("??/*.safetensors"))
    nbytes = sum(file.stat().st_size for file in files)
    clock = Clock()
    for _ in range(rounds):
        with kvdb.open(path) as store:
            clock.time("readinto", lambda: plain(files))
            clock.time("first read", lambda s=store: restore(s, tokens))  # type: ignore[misc]
            clock.time("readinto again", lambda: plain(files))
            clock.time("verified", lambda s=store: restore(s, tokens))  # type: ignore[misc]
    floor = ["readinto", "readinto again"]
    return {
        "bytes": nbytes,
        "GB_per_s": {
            name: round(nbytes / statistics.median(times) / 1e9, 2)
            for name, times in clock.wall.items()
        },
        "first_read_over_readinto": {**clock.ratio(floor, "first read"), "goal": 0.6},
        "verified_over_readinto": {**clock.ratio(floor, "verified"), "goal": 0.8},
        "readinto_against_itself": clock.ratio(["readinto"], "readinto again"),
    }


def save_mlx(path: Path, tokens: np.ndarray, file: Path) -> None:
    """The same state as mlx-lm keeps it."""
    from mlx_lm.models.cache import save_prompt_cache

    with kvdb.open(path) as store:
        _, live = restore(store, tokens)
    save_prompt_cache(str(file), list(live.caches))


def child(what: str, path: Path, count: int) -> None:
    """One restore in this process, imports done before; prints its seconds."""
    import mlx.core as mx
    from mlx_lm.models.cache import load_prompt_cache

    import engine.restore  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:  # loads what an open store needs
        kvdb.open(Path(folder) / "store").close()
    tokens = np.arange(count, dtype=np.uint32)
    wall, cpu = time.perf_counter(), time.process_time()
    if what == "mlx-lm":
        caches = load_prompt_cache(str(path))
        mx.eval([cache.state for cache in caches])
    else:
        store = kvdb.open(path)
        live = restore(store, tokens)
    print(time.perf_counter() - wall, time.process_time() - cpu)
    if what == "kvdb":
        del live
        store.close()


def in_fresh_processes(path: Path, file: Path, count: int, rounds: int) -> dict[str, Any]:
    clock = Clock()
    for _ in range(rounds):
        for what, where in (("kvdb", path), ("mlx-lm", file)):
            command = [sys.executable, "-m", "tests.bench.restore_speed", "--child", what]
            command += ["--path", str(where), "--tokens", str(count)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            wall, cpu = map(float, done.stdout.split())
            clock.wall.setdefault(what, []).append(wall)
            clock.cpu.setdefault(what, []).append(cpu)
    return {
        "ms": {n: round(statistics.median(t) * 1e3, 1) for n, t in clock.wall.items()},
        "kvdb_over_load_prompt_cache": {**clock.ratio(["mlx-lm"], "kvdb"), "goal": 1.0},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--child", choices=("kvdb", "mlx-lm"))
    parser.add_argument("--path", type=Path)
    options = parser.parse_args()
    preload()
    if options.child:
        child(options.child, options.path, options.tokens)
        return
    tokens = np.arange(options.tokens, dtype=np.uint32)
    with tempfile.TemporaryDirectory() as folder:
        path, file = Path(folder) / "store", Path(folder) / "cache.safetensors"
        fill(path, tokens)
        result = {"tokens": options.tokens, **in_this_process(path, tokens, options.rounds)}
        save_mlx(path, tokens, file)
        rounds = max(1, options.rounds // 2)
        result |= in_fresh_processes(path, file, options.tokens, rounds)
        json.dump(result, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()
