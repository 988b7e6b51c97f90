"""Export and import against copying and syncing the same bytes with cp; and how long another
process's writes wait during an import.

    python -m tests.bench.snapshot_speed [--blocks 26] [--rounds 5]

State of SmolLM2's shape in float32, 11.8 MB a block of 256 tokens; interleaved; what is read is in
the page cache. The spread is that of cp against itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
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

# Writes to a store as fast as it may, one row at a time, until its input ends; says the longest.
WRITER = """
import select, sys, time
import kvdb
from kvdb import index

longest = 0.0
with kvdb.open(sys.argv[1]) as store:
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        start = time.perf_counter()
        with store.database.write() as connection:
            index.bump(connection, "leftovers_swept", 0)
        longest = max(longest, time.perf_counter() - start)
print(longest)
"""


def copy(source: Path, target: Path) -> None:
    subprocess.run(["/bin/cp", source, target], check=True)
    for path in (target, target.parent):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def fill(path: Path, blocks: int) -> None:
    tensors = tuple(TensorSpec(n, "F32", (1, HEADS, DIM), 2) for n in ("keys", "values"))
    layout = Layout((LayerSpec("KVCache", tensors),) * LAYERS)
    nbytes = layout.by_name["kv:0"].nbytes(256)
    random = np.random.default_rng(0)
    tokens = np.arange(blocks * 256, dtype=np.uint32)
    with kvdb.open(path, queue_bytes=1 << 40) as store:
        namespace = store.namespace(kvdb.ModelIdentity("bench", "bench"), layout)
        data = [random.integers(0, 255, nbytes, dtype=np.uint8) for _ in range(blocks)]
        payloads = [Payload(number, {"kv:0": block}) for number, block in enumerate(data)]
        assert store.put(namespace, tokens, payloads).wait().stored == blocks


def imported(snapshot: Path, path: Path) -> float:
    """Seconds, into an empty store that is open."""
    with kvdb.open(path) as store:
        start = time.perf_counter()
        store.import_snapshot(snapshot)
        return time.perf_counter() - start


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=26)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    times: dict[str, list[float]] = {}
    waits: list[float] = []

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        root = Path(folder)
        fill(root / "a", options.blocks)
        with kvdb.open(root / "a") as a:
            nbytes = a.export_snapshot(root / "first").nbytes

            def exported(target: Path) -> None:
                a.export_snapshot(target)

            # What was written is removed before the next is timed, and the first round does not
            # count: pages that a virtual machine gets for the first time cost ten times as much.
            for round_ in range(options.rounds + 1):
                calls: list[tuple[str, Callable[[], float]]] = [
                    ("cp", lambda: seconds(lambda: copy(root / "first", root / "new"))),
                    ("export", lambda: seconds(lambda: exported(root / "new"))),
                    ("import", lambda: imported(root / "first", root / "b")),
                    ("cp again", lambda: seconds(lambda: copy(root / "first", root / "new"))),
                ]
                turn = round_ % len(calls)
                for name, call in calls[turn:] + calls[:turn]:
                    times.setdefault(name, []).append(call())
                    (root / "new").unlink(missing_ok=True)
                    shutil.rmtree(root / "b", ignore_errors=True)
                waits.append(beside_a_writer(root / "first", root / "b"))
                shutil.rmtree(root / "b")
    times = {name: values[1:] for name, values in times.items()}
    medians = {name: statistics.median(values) for name, values in times.items()}
    floor = statistics.median(times["cp"] + times["cp again"])
    json.dump(
        {
            "bytes": nbytes,
            "MB_per_s": {name: round(nbytes / m / 1e6) for name, m in medians.items()},
            "export_over_cp": round(floor / medians["export"], 2),
            "import_over_cp": round(floor / medians["import"], 2),
            "cp_against_itself": round(medians["cp"] / medians["cp again"], 2),
            "longest_wait_of_a_writer_s": [round(wait, 3) for wait in waits],
        },
        sys.stdout,
        indent=2,
    )
    print()


def beside_a_writer(snapshot: Path, path: Path) -> float:
    """The longest that a write of another process took during an import."""
    with kvdb.open(path) as store:
        command = [sys.executable, "-c", WRITER, str(path)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            store.import_snapshot(snapshot)
            answer, _ = writer.communicate("end\n")
    return float(answer)


if __name__ == "__main__":
    main()
