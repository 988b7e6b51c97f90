"""Eight processes on one store: nothing is locked, nothing lies, the limit holds."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

import kvdb
from tests.crash.crowd import MAX_BYTES, PROMPTS, wide
from tests.crash.progress import Run, torture_folder
from tests.crash.zygote import Zygote
from tests.support import BLOCK, check_prefix, random_tokens, shard_files

PROCESSES, OPERATIONS = 8, 200
LONG = 40  # rounds
# What one put, or whatever waits for others, may take at worst here, on a slow and busy disk.
BOUND_SECONDS = 20.0


def directory_bytes(path: Path) -> int:
    """As du counts it, but for files that go while it looks."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def crowd_again_and_again(zygote: Zygote, path: Path, run: Run) -> None:
    for step in run.steps():
        shutil.rmtree(path, ignore_errors=True)
        kvdb.open(path, max_bytes=MAX_BYTES, min_free_bytes=0).close()
        started = time.monotonic()
        workers = [
            zygote.start("crowd", path, seed=step * PROCESSES + n, operations=OPERATIONS)
            for n in range(PROCESSES)
        ]
        for worker in workers:
            worker.expect("ready")
        for worker in workers:
            worker.say()
        peak, said = 0, []
        waiting = list(workers)
        while waiting:
            peak = max(peak, directory_bytes(path))
            line = waiting[0].line(0.05)
            if line is not None:
                said.append(json.loads(line))
                waiting.pop(0)
            assert time.monotonic() - started < 300, "the crowd hangs"
            assert line is not None or not waiting[0].ended, "a process died of an error"
        assert [worker.wait() for worker in workers] == [0] * PROCESSES
        _report(step, said, peak, time.monotonic() - started)
        assert peak <= MAX_BYTES
        _settled(path, run)
        run.totals.tried += PROCESSES * OPERATIONS


def _report(
    step: int, said: list[dict[str, dict[str, list[float]]]], peak: int, took: float
) -> None:
    every = sorted(t for one in said for times in one["took"].values() for t in times)
    puts = sorted(t for one in said for t in one["took"]["put"])
    numbers = {
        "round": step,
        "seconds": round(took, 1),
        "p99_ms": round(every[len(every) * 99 // 100] * 1000),
        "put_p50_ms": round(puts[len(puts) // 2] * 1000),
        "put_p99_ms": round(puts[len(puts) * 99 // 100] * 1000),
        "worst_ms": round(every[-1] * 1000),
        "peak_bytes": peak,
        "dropped": [one["dropped"] for one in said if one["dropped"]],
    }
    print(json.dumps(numbers), file=sys.stderr, flush=True)
    assert every[-1] < BOUND_SECONDS
    assert {reason for one in said for reason in one["dropped"]} <= {"limit", "parent_missing"}


def _settled(path: Path, run: Run) -> None:
    """All gone: references are 0, equal blocks are there once, and each file has a row."""
    with kvdb.open(path) as store:
        assert store.verify(data=True).problems == []
        namespace = wide(store)
        for prompt in range(PROMPTS):
            run.totals.looked_up += 1
            check_prefix(store, namespace, random_tokens(prompt, 4 * BLOCK))
        assert store.sql("SELECT count(*) FROM sequences").rows == [(0,)]
        reasons = store.sql("SELECT DISTINCT reason FROM evictions").rows
        assert {reason for (reason,) in reasons} <= {"limit", "manual"}
        rows = store.sql("SELECT uuid, part_bytes - live_bytes FROM shards", limit=1 << 20).rows
        assert {file.stem for file in shard_files(path)} == {uuid for uuid, _ in rows}
        assert store.info().leftovers == 0
        store.evict(to_bytes=0)
        assert store.info().live_blocks == 0
        assert store.sql("SELECT count(*) FROM blocks WHERE refs <> 0").rows == [(0,)]
        assert shard_files(path) == []


def test_eviction_does_not_starve_behind_locks_of_eight_processes(
    zygote: Zygote, path: Path
) -> None:
    crowd_again_and_again(zygote, path, Run("crowd", 1))


@pytest.mark.torture
def test_eviction_does_not_starve_behind_locks_for_ten_minutes(zygote: Zygote) -> None:
    folder = torture_folder()
    crowd_again_and_again(zygote, folder / "crowd", Run("crowd", LONG, folder))
