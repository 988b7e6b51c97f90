"""Restore (match → read → verified → live MLX caches, codec raw) against readinto of the same
bytes into fresh buffers.

    python -m tests.bench.restore_speed [--tokens 4096] [--rounds 9]

State of SmolLM2's shape in float32. Page cache warm for both; interleaved; the spread is that of
plain readinto against itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvdb
from engine.blas import preload
from kvdb.layout import LayerSpec, Layout, TensorSpec
from kvdb.writer import Payload

LAYERS, HEADS, DIM = 30, 3, 64


def fill(path: Path, layout: Layout, tokens: np.ndarray) -> None:
    random = np.random.default_rng(0)
    with kvdb.open(path) as store:
        namespace = store.namespace(kvdb.ModelIdentity("bench", "bench"), layout)
        spec = layout.by_name["kv:0"]
        size = namespace.block_tokens
        for end in range(size, len(tokens) + 1, size):
            raw = random.integers(0, 255, spec.nbytes(size), dtype=np.uint8)
            payload = Payload(end // size - 1, {"kv:0": raw})
            store.put(namespace, tokens[:end], [payload]).wait()


def plain(files: list[Path]) -> int:
    """readinto of whole files into fresh buffers."""
    total = 0
    for file in files:
        buffer = np.empty(file.stat().st_size, dtype=np.uint8)
        with file.open("rb", buffering=0) as handle:
            total += handle.readinto(buffer) or 0
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    preload()
    from mlx_lm.models.cache import KVCache

    from engine.restore import Buffers, capacity_for

    tensors = tuple(TensorSpec(n, "F32", (1, HEADS, DIM), 2) for n in ("keys", "values"))
    layout = Layout((LayerSpec("KVCache", tensors),) * LAYERS)
    tokens = np.arange(options.tokens, dtype=np.uint32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        fill(path, layout, tokens)
        files = sorted((path / "shards").glob("??/*.safetensors"))
        times: dict[str, list[float]] = {}

        def timed(name: str, call: Callable[[], object]) -> None:
            start = time.perf_counter()
            call()
            times.setdefault(name, []).append(time.perf_counter() - start)

        def restore(store: kvdb.Store) -> None:
            namespace = store.namespaces()[0]
            match = store.match(namespace, tokens)
            buffers = Buffers(layout, capacity_for(len(tokens), 256))
            result = store.read(match, buffers.into)
            assert not result.bad
            live = buffers.live([KVCache() for _ in range(LAYERS)])
            live.seek(len(tokens))
            live.evaluate()

        for _ in range(options.rounds):
            with kvdb.open(path) as store:
                timed("readinto", lambda: plain(files))
                timed("first read", lambda s=store: restore(s))  # type: ignore[misc]
                timed("readinto again", lambda: plain(files))
                timed("verified", lambda s=store: restore(s))  # type: ignore[misc]
        medians = {name: statistics.median(values) for name, values in times.items()}
        floor = statistics.median(times["readinto"] + times["readinto again"])
        nbytes = sum(file.stat().st_size for file in files)
        json.dump(
            {
                "tokens": options.tokens,
                "bytes": nbytes,
                "GB_per_s": {n: round(nbytes / m / 1e9, 2) for n, m in medians.items()},
                "first_read_over_readinto": round(floor / medians["first read"], 2),
                "verified_over_readinto": round(floor / medians["verified"], 2),
                "readinto_against_itself": round(
                    medians["readinto"] / medians["readinto again"], 2
                ),
            },
            sys.stdout,
            indent=2,
        )
        print()


if __name__ == "__main__":
    main()
