"""Two processes reading the same hot blocks, together, against two plain readinto processes.

    python -m tests.bench.readers_speed [--tokens 4096] [--rounds 7]

Each pair starts at a common moment and reads the same state a fixed number of times into fresh
buffers of the same shapes; the store's reads were verified once before. Pairs take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import kvdb
from kvdb.layout import Layout

PASSES = 10


def child(kind: str, path: Path, tokens: int) -> None:
    """Prepare, wait for a line, read ``PASSES`` times, print the seconds."""
    files = sorted((path / "shards").glob("??/*.safetensors"))
    with kvdb.open(path) as store:
        namespace = store.namespaces()[0]
        prompt = np.arange(tokens, dtype=np.uint32)

        def read() -> None:
            match = store.match(namespace, prompt)
            into = fresh(namespace.layout, tokens)
            assert not store.read(match, into).bad

        def work() -> None:
            read() if kind == "kvdb" else plain(files, fresh(namespace.layout, tokens))

        work()
        print("ready", flush=True)
        sys.stdin.readline()
        start = time.perf_counter()
        for _ in range(PASSES):
            work()
        print(time.perf_counter() - start, flush=True)


def plain(files: list[Path], into: dict[str, list[list[np.ndarray]]]) -> None:
    """readinto of the files' bytes, in order, into buffers of the same shapes."""
    targets = [
        array.reshape(-1).view(np.uint8).data
        for layers in into.values()
        for layer in layers
        for array in layer
    ]
    for file in files:
        with file.open("rb", buffering=0) as handle:
            while targets:
                count = handle.readinto(targets[0]) or 0
                if count == 0:
                    break
                targets[0] = targets[0][count:]
                if not len(targets[0]):
                    targets.pop(0)


def fresh(layout: Layout, tokens: int) -> dict[str, list[list[np.ndarray]]]:
    return {
        part.name: [
            [np.empty(spec.full_shape(tokens), spec.numpy_dtype) for spec in part.tensors]
            for _ in part.layers
        ]
        for part in layout.parts
        if part.kind == "kv"
    }


def pair(kind: str, path: Path, tokens: int) -> float:
    """Seconds that two processes need when they start together: the mean of both."""
    command = [sys.executable, "-m", "tests.bench.readers_speed", "--child", kind]
    command += ["--store", str(path), "--tokens", str(tokens)]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return statistics.mean(float(process.communicate()[0]) for process in both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child")
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.store, options.tokens)
        return
    from tests.bench.restore_speed import fill

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        fill(path, np.arange(options.tokens, dtype=np.uint32))
        times: dict[str, list[float]] = {"plain": [], "kvdb": [], "plain again": []}
        for _ in range(options.rounds):
            for name in times:
                times[name].append(pair(name.split()[0], path, options.tokens))
    medians = {name: statistics.median(values) for name, values in times.items()}
    floor = statistics.median(times["plain"] + times["plain again"])
    json.dump(
        {
            "seconds": {name: round(value, 3) for name, value in medians.items()},
            "kvdb_over_plain": round(floor / medians["kvdb"], 2),
            "plain_against_itself": round(medians["plain"] / medians["plain again"], 2),
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
