"""Cold start of ``kvdb query "select 1"`` against ``sqlite-utils query`` of the same file.

    python -m tests.bench.query_speed [--rounds 15] [--store DIR]

New processes, in turn, with the page cache warm; the spread is that of sqlite-utils against itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import kvdb
from kvdb.layout import LayerSpec, Layout, TensorSpec

STATEMENT = "select 1"


def milliseconds(command: list[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=True, env=dict(os.environ))
    took = (time.perf_counter() - began) * 1e3
    if json.loads(done.stdout) != [{"1": 1}]:
        sys.exit(f"{command} printed {done.stdout!r}.")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.store or Path(folder) / "store"
        if not path.exists():
            with kvdb.open(path, min_free_bytes=0) as store:
                layout = Layout((LayerSpec("KVCache", (TensorSpec("k", "F32", (1, 1, 4), 2),)),))
                store.namespace(kvdb.ModelIdentity("bench", "bench"), layout)
        file = str(path / "index.sqlite")
        python = [sys.executable, "-m"]
        sqlite_utils = [*python, "sqlite_utils", "query", file, STATEMENT]
        commands = {
            "sqlite-utils": sqlite_utils,
            "kvdb": [*python, "kvdb", "query", "--store", str(path), STATEMENT],
            "sqlite-utils again": sqlite_utils,
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(options.rounds + 1):
            for name, command in commands.items():
                took = milliseconds(command)
                if turn:  # the first finds no compiled files
                    times[name].append(took)
    medians = {name: statistics.median(values) for name, values in times.items()}
    json.dump(
        {
            "median_ms": {name: round(value, 1) for name, value in medians.items()},
            "kvdb_over_sqlite_utils": round(medians["kvdb"] / medians["sqlite-utils"], 2),
            "sqlite_utils_against_itself": round(
                medians["sqlite-utils again"] / medians["sqlite-utils"], 2
            ),
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
