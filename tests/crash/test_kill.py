"""kill -9 at random moments: every acknowledged block reads back, and nothing needs repair."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import kvdb
from tests.support import BLOCK, check_prefix, open_namespace, random_tokens

CYCLES = int(os.environ.get("KVDB_KILLS", "12"))


def run_until_killed(path: Path, seed: int, lines: int) -> list[str]:
    """Run the worker, kill it after it printed ``lines`` lines; returns all it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.worker", str(path), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    printed = [process.stdout.readline() for _ in range(lines)]
    process.send_signal(signal.SIGKILL)
    printed += process.stdout.readlines()
    process.wait()
    return [line.strip() for line in printed if line.endswith("\n")]


def test_torn_file_after_a_crash_is_never_seen(path: Path) -> None:
    chance = random.Random(5)
    acknowledged: set[tuple[int, int]] = set()
    tried = lost = 0
    for cycle in range(CYCLES):
        printed = run_until_killed(path, cycle, chance.randrange(1, 60))
        for line in printed:
            word, *rest = line.split()
            if word == "ack":
                acknowledged.add((int(rest[0]), int(rest[1])))
        with kvdb.open(path) as store:
            namespace = open_namespace(store)
            evicted = {
                (bytes.fromhex(row[0]))
                for row in store.sql(
                    "SELECT lower(hex(block_hash)) FROM evictions", limit=1_000_000
                ).rows
            }
            for prompt, blocks in sorted(acknowledged):
                tried += 1
                tokens = random_tokens(prompt, blocks * BLOCK)
                match = store.match(namespace, tokens)
                if match.hashes[-1] in evicted:
                    acknowledged.discard((prompt, blocks))
                elif check_prefix(store, namespace, tokens) < blocks * BLOCK:
                    lost += 1
            report = store.verify(data=True)
            assert report.problems == []
            assert store.info().leftovers == 0
            assert list((path / "tmp").iterdir()) == []
            assert store.sql("SELECT count(*) FROM evictions WHERE reason <> 'manual'").rows == [
                (0,)
            ]
    assert acknowledged
    assert (lost, tried > 0) == (0, True)
    print(f"{CYCLES} kills, {tried} look-ups of acknowledged blocks, {lost} lost")
