"""One self-contained HTML page about a store: queries → plain data → figures → page."""

from __future__ import annotations

from kvdb.report.history import Scope
from kvdb.report.make import make_report

__all__ = ["Scope", "make_report"]
