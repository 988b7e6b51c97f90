"""A picture of fleets: where tokens came from, and how long the first one took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvdb.simulate.fleet_result import FleetResult
from kvdb.simulate.plot import save
from kvdb.simulate.rates import rate_text

LOCAL, REMOTE, COMPUTED = "#2f6db3", "#e08a2c", "#d5d8dc"
INK = "#333333"
# Share of the time to the first token, line, width.
WAITS = (("p99_seconds", "p99", ":"), ("mean_seconds", "mean", "-"), ("p50_seconds", "p50", "--"))


def draw_fleets(results: Sequence[FleetResult], path: Path, title: str) -> None:
    """One column a number of machines, one bar a bandwidth; replaces the file at ``path``."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    counts = list(dict.fromkeys(result.nodes for result in results))
    figure = Figure(figsize=(2.2 + 2.6 * len(counts), 5.4), dpi=120, layout="constrained")
    axes = figure.subplots(2, len(counts), sharex="col", sharey="row", squeeze=False)
    for column, count in enumerate(counts):
        ours = [result for result in results if result.nodes == count]
        places = range(len(ours))
        shares, waits = axes[0][column], axes[1][column]
        local = [100 * result.local_hit_ratio for result in ours]
        remote = [100 * result.remote_hit_ratio for result in ours]
        both = [a + b for a, b in zip(local, remote, strict=True)]
        shares.bar(places, local, color=LOCAL, label="local")
        shares.bar(places, remote, bottom=local, color=REMOTE, label="remote")
        shares.bar(places, [100 - x for x in both], bottom=both, color=COMPUTED, label="computed")
        for place, hit in zip(places, both, strict=True):
            shares.text(place, hit + 1.5, f"{hit:.0f}", ha="center", color=INK, fontsize="small")
        for name, label, line in WAITS:
            seconds = [getattr(result, name) for result in ours]
            waits.plot(places, seconds, line, marker="o", markersize=4, color=INK, label=label)
        waits.set_yscale("log")
        waits.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        waits.yaxis.set_major_formatter("{x:g}")
        waits.yaxis.set_minor_formatter(NullFormatter())
        waits.grid(axis="y", alpha=0.25)
        texts = [rate_text(result.remote_bandwidth) for result in ours]
        waits.set_xticks(places, texts, rotation=35, ha="right", fontsize="small")
        shares.set_ylim(0, 100)
        shares.set_title(f"{count:,} machine{'s' if count > 1 else ''}", fontsize="medium")
        for one in (shares, waits):
            one.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("prompt tokens, %")
    axes[1][0].set_ylabel("time to first token, s")
    handles = [*axes[0][0].get_legend_handles_labels()[0], *axes[1][0].get_lines()]
    figure.legend(handles=handles, loc="outside right center", fontsize="small", frameon=False)
    figure.supxlabel("bandwidth of the remote, shared by all", fontsize="small")
    figure.suptitle(title, fontsize="medium")
    save(figure, path)
