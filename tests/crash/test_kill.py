"""kill -9 at random moments: every acknowledged block reads back, and nothing needs repair."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest

from tests.crash.oracle import Ledger, check_store
from tests.crash.progress import Run, torture_folder
from tests.crash.zygote import Worker, Zygote

SHORT, LONG = 60, 2000
# A worker lives this long at most: opening takes a tenth of it.
LIFE_SECONDS = 0.25


def hear_until(worker: Worker, deadline: float) -> list[str]:
    lines = []
    while (left := deadline - time.monotonic()) > 0:
        line = worker.line(left)
        if line is not None:
            lines.append(line)
    return lines


def kill_again_and_again(zygote: Zygote, path: Path, run: Run) -> None:
    ledger = Ledger()
    if run.fresh:
        shutil.rmtree(path, ignore_errors=True)
    else:
        ledger.acks = {(layout, prompt, count) for layout, prompt, count in run.state["acks"]}
        ledger.names = {name: tuple(ack) for name, ack in run.state["names"].items()}
        ledger.evicting, ledger.swept = True, run.state["swept"]
    for cycle in run.steps():
        chance = random.Random(cycle)
        worker = zygote.start("churn", path, seed=cycle)
        lines = hear_until(worker, time.monotonic() + chance.uniform(0.0, LIFE_SECONDS))
        worker.kill()
        lines += worker.rest()
        assert worker.wait() == -9
        run.totals.tried += 1
        run.totals.acknowledged += ledger.hear(lines)
        run.totals.add(check_store(path, ledger))
        run.state = {"acks": sorted(ledger.acks), "names": ledger.names, "swept": ledger.swept}
    run.assert_nothing_lost()
    assert run.totals.acknowledged


def test_torn_file_after_a_crash_is_never_seen(zygote: Zygote, path: Path) -> None:
    kill_again_and_again(zygote, path, Run("kill", SHORT))


@pytest.mark.torture
def test_torn_file_after_a_crash_is_never_seen_two_thousand_times(zygote: Zygote) -> None:
    folder = torture_folder()
    kill_again_and_again(zygote, folder / "kill", Run("kill", LONG, folder))
