"""A store for people to look at: queries → plain data → sections → one page that stands alone, or
the server's live one."""

from __future__ import annotations

from kvdb.report.history import Scope
from kvdb.report.live import Live, read_live
from kvdb.report.make import make_report

__all__ = ["Live", "Scope", "make_report", "read_live"]
