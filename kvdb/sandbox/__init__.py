"""Safe ad-hoc SQL over the store's tables and views.

Opening a file read-only is no sandbox: ATTACH still creates files and VACUUM INTO still writes
copies. What is not allowed is denied by SQLite's authorizer (``rules``); time, rows and bytes are
capped (``statement``), and memory (``memory``). A deadline works between SQLite's instructions and
cannot stop a row of long C functions: a program that runs one statement ends itself instead, and
whoever must go on, a server or a shell, runs statements in a child it can kill (``child``). The few
changes that are allowed go through ``write``.
"""

from kvdb.sandbox.child import SandboxProcess, run_in_child
from kvdb.sandbox.memory import MEMORY_BYTES, bounded_memory, cap_process_memory
from kvdb.sandbox.statement import (
    DEFAULT_DEADLINE_SECONDS,
    DEFAULT_LIMIT,
    Parameters,
    SqlResult,
    run_sql,
)

__all__ = [
    "DEFAULT_DEADLINE_SECONDS",
    "DEFAULT_LIMIT",
    "MEMORY_BYTES",
    "Parameters",
    "SandboxProcess",
    "SqlResult",
    "bounded_memory",
    "cap_process_memory",
    "run_in_child",
    "run_sql",
]
