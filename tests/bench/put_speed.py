"""Durable puts against writing and syncing the same bytes as plain 64 MiB files.

    python -m tests.bench.put_speed [--blocks 26] [--rounds 7]

State of SmolLM2's shape in float32, 11.8 MB a block of 256 tokens; interleaved; the spread is that
of the plain files against themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvdb
from kvdb.layout import LayerSpec, Layout, TensorSpec
from kvdb.writer import Payload

LAYERS, HEADS, DIM = 30, 3, 64
FILE_BYTES = 64 << 20


def plain(folder: Path, every: memoryview) -> None:
    """Write all bytes to files of 64 MiB, each synced, and sync their folder."""
    for start in range(0, len(every), FILE_BYTES):
        fd = os.open(folder / f"plain-{start}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        rest = every[start : start + FILE_BYTES]
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
        os.close(fd)
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=26)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    tensors = tuple(TensorSpec(n, "F32", (1, HEADS, DIM), 2) for n in ("keys", "values"))
    layout = Layout((LayerSpec("KVCache", tensors),) * LAYERS)
    nbytes = layout.by_name["kv:0"].nbytes(256)
    random = np.random.default_rng(0)
    data = [random.integers(0, 255, nbytes, dtype=np.uint8) for _ in range(options.blocks)]
    every = np.concatenate(data).data
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        times.setdefault(name, []).append(time.perf_counter() - start)

    def put(store: kvdb.Store, tokens: np.ndarray) -> None:
        payloads = [Payload(n, {"kv:0": block}) for n, block in enumerate(data)]
        namespace = store.namespace(kvdb.ModelIdentity("bench", "bench"), layout)
        result = store.put(namespace, tokens, payloads).wait()
        assert result.stored == options.blocks, result

    for round_ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            root = Path(folder)
            tokens = np.arange(options.blocks * 256, dtype=np.uint32) + round_

            with kvdb.open(root / "store", queue_bytes=1 << 40) as store:
                for name in ("plain", "plain again"):
                    (root / name).mkdir()
                calls: list[tuple[str, Callable[[], object]]] = [
                    ("plain", lambda root=root: plain(root / "plain", every)),  # type: ignore[misc]
                    ("put", lambda s=store, t=tokens: put(s, t)),  # type: ignore[misc]
                    ("plain again", lambda root=root: plain(root / "plain again", every)),  # type: ignore[misc]
                ]
                # What comes later in a round pays for the pages that came before.
                turn = round_ % len(calls)
                for name, call in calls[turn:] + calls[:turn]:
                    timed(name, call)
    medians = {name: statistics.median(values) for name, values in times.items()}
    floor = statistics.median(times["plain"] + times["plain again"])
    total = nbytes * options.blocks
    json.dump(
        {
            "bytes": total,
            "MB_per_s": {n: round(total / m / 1e6) for n, m in medians.items()},
            "put_over_plain": round(floor / medians["put"], 2),
            "plain_against_itself": round(medians["plain"] / medians["plain again"], 2),
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
