"""Totals of a run, and the state that lets a long run go on in pieces.

Long runs (``make torture``) keep their state in ``KVDB_TORTURE_DIR`` (default: a folder under the
system's temp folder); with ``KVDB_TORTURE_SECONDS`` each test stops after that time, is reported as
skipped, and goes on where it was when it is run again. A finished one starts anew.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pytest


@dataclass(slots=True)
class Totals:
    """What a run did and found. ``tried`` faults, ``looked_up`` acknowledged blocks after them,
    ``lost`` of those, ``wrong`` reads, ``refused`` opens (rebuild was asked for), ``left_over``
    files without a row, ``swept`` leftovers removed (by an open, or by verify)."""

    tried: int = 0
    acknowledged: int = 0
    looked_up: int = 0
    lost: int = 0
    wrong: int = 0
    refused: int = 0
    left_over: int = 0
    swept: int = 0

    def add(self, other: Totals) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def torture_folder() -> Path:
    default = Path(tempfile.gettempdir()) / f"kvdb-torture-{os.getuid()}"
    return Path(os.environ.get("KVDB_TORTURE_DIR", default))


class Run:
    """Steps of one test, numbered from 0. With ``folder`` they are resumed where they stopped."""

    def __init__(self, name: str, goal: int, folder: Path | None = None) -> None:
        self.name = name
        self.goal = goal
        self.totals = Totals()
        self.state: dict[str, Any] = {}
        self._file = None if folder is None else folder / f"{name}.json"
        self._done = 0
        self._budget = float(os.environ.get("KVDB_TORTURE_SECONDS", "inf"))
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            if self._file.exists():
                saved = json.loads(self._file.read_text())
                if saved["done"] < saved["goal"] and goal in (0, saved["goal"]):
                    self._done, self.goal = saved["done"], saved["goal"]
                    self.totals = Totals(**saved["totals"])
                    self.state = saved["state"]

    @property
    def fresh(self) -> bool:
        """True when nothing was done yet."""
        return self._done == 0

    def plan(self, make: Callable[[], list[Any]]) -> list[Any]:
        """What to do at each step (the goal is 0 at first). Made once and kept, since it need not
        come out the same when the run goes on."""
        if "plan" not in self.state:
            self.state["plan"] = make()
            self.goal = len(self.state["plan"])
        return list(self.state["plan"])

    def steps(self) -> Iterator[int]:
        started = time.monotonic()
        while self._done < self.goal:
            if self._file is not None and time.monotonic() - started > self._budget:
                pytest.skip(f"{self.name} paused at {self._done} of {self.goal}: run it again")
            yield self._done
            self._done += 1
            if self._file is not None:
                self._save(self._file)
                if self._done % max(1, self.goal // 50) == 0:
                    print(f"{self.name}: {self._done} of {self.goal}", file=sys.stderr, flush=True)
        print(json.dumps({"run": self.name, **asdict(self.totals)}), file=sys.stderr, flush=True)

    def _save(self, file: Path) -> None:
        document = {
            "done": self._done,
            "goal": self.goal,
            "totals": asdict(self.totals),
            "state": self.state,
        }
        new = file.with_suffix(".new")
        new.write_text(json.dumps(document))
        new.replace(file)

    def assert_nothing_lost(self) -> None:
        totals = self.totals
        assert totals.tried
        assert (totals.lost, totals.wrong, totals.refused) == (0, 0, 0), totals


def spread(count: int, among: int) -> list[int]:
    """``count`` of ``among`` indices, evenly spread, the first and the last included."""
    if count >= among:
        return list(range(among))
    return sorted({round(i * (among - 1) / (count - 1)) for i in range(count)})
