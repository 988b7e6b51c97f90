"""Sections → one HTML page that asks nothing of any network.

Its content security policy lets a browser run the page's own two scripts, known by their hashes,
and load nothing. Every text goes through Jinja's escaping.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from kvdb.report import words
from kvdb.report.sections import Section, Tile


@dataclass(frozen=True, slots=True)
class Page:
    """What the page says, from top to bottom."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]


def render(page: Page) -> str:
    """The page as HTML, about 5 MB, nearly all of it plotly.js."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    # A browser reads \r\n as \n before it hashes a script.
    plotly = get_plotlyjs().replace("\r\n", "\n")
    script = _own("page.js")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["shown"] = words.shown
    return environment.from_string(_own("page.html")).render(
        page=page,
        policy=_policy(plotly, script),
        figures={
            str(number): section.figure
            for number, section in enumerate(page.sections)
            if section.figure
        },
        style=_own("page.css"),
        plotly=plotly,
        script=script,
    )


def _own(name: str) -> str:
    return (resources.files("kvdb.report") / name).read_text("utf-8")


def _policy(*scripts: str) -> str:
    hashes = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(hash_).decode()}'" for hash_ in hashes)
    # Plotly sets styles on what it draws.
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
