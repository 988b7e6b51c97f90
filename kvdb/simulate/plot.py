"""A picture of hit ratio over capacity. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdb.errors import KvdbError, UsageError
from kvdb.simulate.replay import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".pdf", ".png", ".svg")
OURS, BOUND = "kvdb", "belady"


def check_plot(path: Path) -> None:
    """Raise now what :func:`draw` would raise after minutes of replay."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path} must end in one of {', '.join(FORMATS)}.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder} to draw in.")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"The folder {folder} cannot be written.")
    if importlib.util.find_spec("matplotlib") is None:
        raise KvdbError("Drawing needs matplotlib (kvdb's extra plot): pip install matplotlib.")


def draw(results: Sequence[Result], path: Path, title: str) -> None:
    """Draw one line a policy, and replace the file at ``path``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    styles: dict[str, dict[str, Any]] = {
        OURS: {"color": "black", "linewidth": 2.6, "marker": "o", "zorder": 3},
        BOUND: {"color": "#888888", "linewidth": 1.2, "linestyle": "--", "marker": "."},
    }
    percents = {float(result.capacity.removesuffix("%")): result.capacity for result in results}
    for policy in dict.fromkeys(result.policy for result in results):
        points = sorted(
            (float(result.capacity.removesuffix("%")), 100 * result.hit_ratio)
            for result in results
            if result.policy == policy
        )
        style = styles.get(policy, {"linewidth": 1.2, "marker": ".", "alpha": 0.85})
        axes.plot(*zip(*points, strict=True), label=policy, **style)
    axes.set_xscale("log")
    axes.set_xticks(list(percents), labels=list(percents.values()))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, share of all different blocks")
    axes.set_ylabel("block references that hit, %")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", ncols=2, fontsize="small")
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a picture whose format is that of the name."""
    # A file that differs with every run or matplotlib would change in version control for nothing.
    changing = {".pdf": "CreationDate", ".png": "Software", ".svg": "Date"}
    figure.savefig(path, metadata={changing[path.suffix.lower()]: None})
