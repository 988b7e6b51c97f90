"""Opening after kill -9 with 1 M blocks against 1 K blocks.

    python -m tests.bench.open_speed [--blocks 1000000] [--rounds 9]

A process fills each store and is killed; every opening is timed in a new process, large and small
in turn, import of kvdb not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OPEN = (
    "import sys, time, os, signal, kvdb, kvdb.opening\n"
    "start = time.perf_counter()\n"
    "store = kvdb.open(sys.argv[1])\n"
    "print(time.perf_counter() - start, flush=True)\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n"
)
FILL = (
    "import sys, os, signal, kvdb\n"
    "from tests.bench.match_speed import *\n"
    "layout = Layout((LayerSpec('KVCache', (TensorSpec('keys', 'F32', (1, 1, 4), 2),)),))\n"
    "store = kvdb.open(sys.argv[1])\n"
    "namespace = store.namespace(kvdb.ModelIdentity('b', 'b'), layout)\n"
    "fill(store, namespace, int(sys.argv[2]))\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n"
)


def opening(path: Path) -> float:
    """Seconds that a new process needs to open the store; it dies without closing it."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode != -signal.SIGKILL:
        sys.exit(done.stderr)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        for path, blocks in ((small, 1024), (large, options.blocks)):
            command = [sys.executable, "-c", FILL, str(path), str(blocks)]
            subprocess.run(command, check=False, env=dict(os.environ))
        times: dict[str, list[float]] = {"small": [], "large": [], "small again": []}
        for _ in range(options.rounds):
            times["small"].append(opening(small))
            times["large"].append(opening(large))
            times["small again"].append(opening(small))
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    json.dump(
        {
            "blocks": options.blocks,
            "median_ms": {name: round(value, 2) for name, value in medians.items()},
            "large_over_small": round(medians["large"] / medians["small"], 2),
            "small_against_itself": round(medians["small again"] / medians["small"], 2),
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
