"""The page's figures, from plain data. Colours of text and grid are left to the page, which knows
whether it is light or dark.

Every name in a figure goes through :func:`label`: plotly reads its texts as a kind of HTML.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from kvdb.report import words
from kvdb.report.blocks import AGES, HEATS, Ints
from kvdb.report.history import DAY_US, HOUR_US, History
from kvdb.report.losses import REASONS, Evicted
from kvdb.report.tree import Beginning, PrefixTree

Figure = dict[str, Any]

# Told apart by people who see no red or no green, on white and on black.
GREEN, GREY, BLUE, ORANGE, PINK, YELLOW, CYAN = (
    "#1b9e77",
    "#99a1ab",
    "#4c86c6",
    "#e08214",
    "#c76ba6",
    "#d9b310",
    "#56b4d3",
)
HEAT = ("#99a1ab", "#e8c26a", "#e08214", "#b5402b")
ROW_HEIGHT = 34
LEAST_PERIODS = 14
MARGIN = {"l": 8, "r": 16, "t": 8, "b": 8}


def label(name: str, most: int = words.MAX_NAME) -> str:
    """A foreign name as text in a figure. Between dollar signs plotly would look for formulas."""
    return html.escape(words.shown(name, most), quote=False).replace("$", "&#36;")


def tokens_over_time(history: History) -> Figure:
    times, uses = _times(history), [history.periods[start] for start in sorted(history.periods)]
    return _bars(
        times,
        {
            "restored": (GREEN, [use.restored_tokens for use in uses]),
            "computed": (GREY, [use.forwarded_tokens for use in uses]),
        },
        history.period_us,
        "prompt tokens",
    )


def seconds_over_time(history: History) -> Figure:
    seconds = [history.periods[start].seconds_saved for start in sorted(history.periods)]
    return _bars(
        _times(history),
        {"seconds saved": (BLUE, [round(value, 3) for value in seconds])},
        history.period_us,
        "seconds",
    )


def hit_ratios(rows: Sequence[tuple[str, float, str]]) -> Figure:
    """``rows`` are (tenant, ratio, text at the bar)."""
    return _rows(rows, GREEN, {"range": [0, 1]})


def capacity(rows: Sequence[tuple[str, int, str]]) -> Figure:
    """``rows`` are (namespace, bytes, text at the bar)."""
    return _rows(rows, BLUE, {})


def age_and_heat(counts: Ints) -> Figure:
    names = [name for name, _ in AGES]
    series = {
        heat: (colour, [int(count) for count in counts[:, column]])
        for column, ((heat, _), colour) in enumerate(zip(HEATS, HEAT, strict=True))
    }
    return _bars(names, series, None, "blocks")


def evictions(rows: Sequence[Evicted]) -> Figure:
    colours = dict(zip(REASONS, (ORANGE, PINK, BLUE, YELLOW, CYAN, "#b5402b", GREEN), strict=True))
    days = sorted({row.day_us for row in rows})
    by_reason: dict[str, dict[int, int]] = {}
    for row in rows:
        by_reason.setdefault(row.reason, {})[row.day_us] = row.blocks
    return _bars(
        [_date(day) for day in days],
        {
            REASONS.get(reason, label(reason)): (
                colours.get(reason, GREY),
                [by_reason[reason].get(day, 0) for day in days],
            )
            for reason in sorted(by_reason)
        },
        DAY_US,
        "blocks",
    )


def wear(days: Mapping[int, int]) -> Figure:
    """Bytes written by day (its start, Unix µs)."""
    return _bars(
        [_date(day) for day in sorted(days)],
        {"written": (PINK, [days[day] / 1e6 for day in sorted(days)])},
        DAY_US,
        "MB",
    )


def icicle(
    tree: PrefixTree, names: Mapping[int, str], beginnings: Mapping[int, Beginning]
) -> Figure:
    """``names`` of namespaces, and how the boxes begin, by their numbers."""
    hottest = max((box.hits for box in tree.boxes), default=0)
    totals: dict[int, int] = defaultdict(int)
    rows: list[tuple[str, str, str, int, float]] = []  # id, parent, label, tokens, heat

    def add(id_: str, parent: int, namespace_id: int, text: str, tokens: int, heat: float) -> None:
        if parent < 0:
            totals[namespace_id] += tokens
        rows.append((id_, f"b{parent}" if parent >= 0 else f"n{namespace_id}", text, tokens, heat))

    for box in tree.boxes:
        beginning = beginnings.get(box.number)
        used = "never used again" if box.hits == 0 else f"used {words.amount(box.hits)}×"
        text = f"{box.end - box.start:,} tokens, {used}"
        if beginning is not None and beginning.text:
            text = f"{label(beginning.text, 30)}<br>{text}"
        add(
            f"b{box.number}",
            box.parent,
            box.namespace_id,
            text,
            box.subtree_tokens,
            _heat(box.hits),
        )
    for number, rest in enumerate(tree.rests):
        text = f"{rest.branches:,} more, not drawn"
        add(f"r{number}", rest.parent, rest.namespace_id, text, rest.tokens, 0)
    # Without a root plotly would draw a black one.
    root = "all" if len(totals) > 1 else ""
    for namespace_id, tokens in totals.items():
        text = f"<b>{label(names.get(namespace_id, ''))}</b><br>{words.amount(tokens)} tokens"
        rows.append((f"n{namespace_id}", root, text, tokens, 0))
    if root:
        text = f"<b>all models</b><br>{words.amount(tree.tokens)} tokens"
        rows.append((root, "", text, tree.tokens, 0))
    ids, parents, labels, values, colours = map(list, zip(*rows, strict=True))
    return {
        "data": [
            {
                "type": "icicle",
                "ids": ids,
                "labels": labels,
                "parents": parents,
                "values": values,
                "textinfo": "label",
                "hovertemplate": "%{label}<br>%{value:,} tokens here and behind<extra></extra>",
                "branchvalues": "total",
                "sort": True,
                "tiling": {"orientation": "h", "pad": 1},
                "pathbar": {"visible": False},
                "marker": {
                    "colors": colours,
                    "colorscale": [
                        [0, "#c9d3dd"],
                        [0.35, "#f1d48a"],
                        [0.7, "#e9963e"],
                        [1, "#c0492f"],
                    ],
                    "cmin": 0,
                    "cmax": max(_heat(hottest), 1),
                    "line": {"width": 1},
                },
            }
        ],
        "layout": {
            "height": 520,
            "margin": MARGIN,
            "uniformtext": {"minsize": 10, "mode": "hide"},
        },
    }


def _heat(hits: int) -> float:
    return math.log2(1 + hits)


def _bars(
    x: Sequence[str],
    series: Mapping[str, tuple[str, Sequence[float]]],
    period_us: int | None,
    unit: str,
) -> Figure:
    """Stacked bars over time, or over categories."""
    width = {} if period_us is None else {"width": period_us / 1e3 * 0.85, "offset": 0}
    return {
        "data": [
            {
                "type": "bar",
                "name": name,
                "x": list(x),
                "y": list(values),
                "marker": {"color": colour},
                "hovertemplate": f"%{{x}}<br>{name}: %{{y:,}} {unit}<extra></extra>",
                **width,
            }
            for name, (colour, values) in series.items()
        ],
        "layout": {
            "height": 280,
            "margin": MARGIN,
            "barmode": "stack",
            "showlegend": len(series) > 1,
            "legend": {
                "orientation": "h",
                "traceorder": "normal",
                "x": 0,
                "y": 1.02,
                "yanchor": "bottom",
            },
            "xaxis": {
                "type": "category" if period_us is None else "date",
                "fixedrange": True,
                "automargin": True,
                **({} if period_us is None else {"range": _range(x, period_us)}),
            },
            "yaxis": {"title": {"text": unit}, "fixedrange": True, "automargin": True},
        },
    }


def _range(times: Sequence[str], period_us: int) -> list[str]:
    """From the first time on, and long enough that a bar looks like a bar."""
    first, last = datetime.fromisoformat(times[0]), datetime.fromisoformat(times[-1])
    period = timedelta(microseconds=period_us)
    end = max(last + period, first + LEAST_PERIODS * period)
    return [str(first), str(end)]


def _rows(rows: Sequence[tuple[str, float, str]], colour: str, axis: Mapping[str, Any]) -> Figure:
    """One horizontal bar a row, the first on top, with its text."""
    # A bar of no length would lose its text.
    least = 0.002 * max(value for _, value, _ in rows) or 1e-6
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                # Two rows of one name must stay two bars: the place is a number, the name a tick.
                "y": list(range(len(rows))),
                "x": [max(value, least) for _, value, _ in rows],
                "text": [label(text, 80) for _, _, text in rows],
                "textposition": "auto",
                "marker": {"color": colour},
                "hoverinfo": "skip",
            }
        ],
        "layout": {
            "height": 16 + ROW_HEIGHT * len(rows),
            "margin": MARGIN,
            "showlegend": False,
            "xaxis": {"fixedrange": True, "visible": False, **axis},
            "yaxis": {
                "autorange": "reversed",
                "automargin": True,
                "fixedrange": True,
                "showgrid": False,
                "zeroline": False,
                "tickvals": list(range(len(rows))),
                "ticktext": [label(name, 28) for name, _, _ in rows],
            },
        },
    }


def _times(history: History) -> list[str]:
    form = "%Y-%m-%d %H:%M" if history.period_us == HOUR_US else "%Y-%m-%d"
    return [
        datetime.fromtimestamp(start / 1e6, UTC).strftime(form) for start in sorted(history.periods)
    ]


def _date(day_us: int) -> str:
    return datetime.fromtimestamp(day_us / 1e6, UTC).strftime("%Y-%m-%d")
