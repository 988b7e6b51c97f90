"""Power cuts, played over the real system calls of a store's life, SQLite's own included."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from kvdb.errors import KvdbError
from tests.crash.oracle import Ack, Ledger, check_store
from tests.crash.progress import Run, spread, torture_folder
from tests.crash.replay import Disk, Event, parse, record
from tests.crash.tracing import needs_strace
from tests.crash.zygote import Zygote

SHORT, LONG = 200, 5000


def told(events: list[Event], durability: str) -> tuple[Ledger, set[Ack]]:
    """What was acknowledged in a prefix, and what of it must outlive the cut: all of it under
    "power"; under "process" what the index's log, synced since, holds."""
    ledger, safe = Ledger(), Ledger()
    for event in events:
        if event.kind == "said":
            ledger.hear([event.data.decode().strip()])
        if durability == "power" or (event.kind == "sync" and event.path.endswith("-wal")):
            safe.acks = set(ledger.acks)
    return ledger, safe.acks


def cut_again_and_again(zygote: Zygote, folder: Path, durability: str, run: Run) -> None:
    log = folder / f"{durability}.log"
    shutil.rmtree(folder / durability, ignore_errors=True)
    store = folder / durability / "store"
    store.parent.mkdir(parents=True)
    if not log.exists() or run.fresh:
        record(zygote, "story", store, log, durability=durability)
        shutil.rmtree(store)
    events = parse(log.read_text(), store)
    assert {"write", "sync", "rename", "unlink"} <= {event.kind for event in events}
    states = spread(min(run.goal, len(events)), len(events))
    disk, played = Disk(), 0
    for step in run.steps():
        # Positions in order, each as often as the goal asks for.
        position = states[step * len(states) // run.goal] + 1
        while played < position:
            disk.play(events[played])
            played += 1
        shutil.rmtree(store.parent)
        store.parent.mkdir()
        disk.cut_power(store.parent, random.Random(step))
        ledger, must = told(events[:position], durability)
        run.totals.tried += 1
        run.totals.acknowledged += len(must)
        try:
            run.totals.add(check_store(store, ledger, must=must))
        except (KvdbError, AssertionError) as error:
            error.add_note(f"power cut after {events[position - 1]!r:.200}, state {step}")
            raise
    run.assert_nothing_lost()


@needs_strace
@pytest.mark.parametrize("durability", ["process", "power"])
def test_index_before_data_never_after_a_power_cut(
    zygote: Zygote, tmp_path: Path, durability: str
) -> None:
    cut_again_and_again(zygote, tmp_path, durability, Run(f"power cut, {durability}", SHORT // 2))


@needs_strace
@pytest.mark.torture
@pytest.mark.parametrize("durability", ["process", "power"])
def test_index_before_data_never_after_five_thousand_power_cuts(
    zygote: Zygote, durability: str
) -> None:
    folder = torture_folder()
    run = Run(f"power-cut-{durability}", LONG // 2, folder)
    cut_again_and_again(zygote, folder / "power", durability, run)
