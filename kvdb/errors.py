"""Typed errors. Each class carries its exit code; each message is one sentence with a next step."""

from __future__ import annotations

import errno
from pathlib import Path


class KvdbError(Exception):
    """Base of every error that kvdb raises on purpose."""

    exit_code = 1


class UsageError(KvdbError):
    """An argument has a value that kvdb cannot use."""

    exit_code = 2


class StoreMissing(KvdbError):
    """There is no store at the given path."""

    exit_code = 10


class StoreLocked(KvdbError):
    """Another process holds the store exclusively, or exclusive work meets others on it."""

    exit_code = 11


class StoreTooNew(KvdbError):
    """The store was written by a newer kvdb."""

    exit_code = 12


class IntegrityError(KvdbError):
    """Stored bytes or the index are not what they should be."""

    exit_code = 13


class SnapshotRejected(IntegrityError):
    """A snapshot is damaged, hostile, encrypted for others, or made by a newer program."""


class StoreUnavailable(IntegrityError):
    """The store cannot be used now (unwritable folder, no space to open, unreadable index)."""


class NotAStore(IntegrityError):
    """The path holds something that is not a kvdb store."""


class StoreReadOnly(KvdbError):
    """A write was asked of a store that was opened, or can only be opened, for reading."""


class StoreClosed(KvdbError):
    """The store object was closed, or is used in a forked child."""


class OutOfSpace(KvdbError):
    """The disk or the store's own limit leaves no room."""


class OutOfMemory(KvdbError):
    """A request does not fit the memory that the process may use."""


class Busy(KvdbError):
    """There is no place for a request now; there may be one in ``retry_seconds``."""

    def __init__(self, message: str, retry_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


def disk_error(root: Path, error: OSError) -> KvdbError:
    """The typed error for what the file system refused at the store in ``root``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpace(f"The disk under {root} is full; free some space.")
    return StoreUnavailable(f"The store at {root} cannot be used: {error.strerror or error}.")


class QuotaExceeded(KvdbError):
    """A pin or a named sequence would hold more than its tenant may hold."""


class QueryError(KvdbError):
    """An ad-hoc SQL statement is wrong, forbidden, or ran into a limit."""


class MissingParameter(QueryError):
    """A statement names a parameter that has no value. ``name`` is without its colon."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The parameter :{name} has no value.")
        self.name = name


class ModelError(KvdbError):
    """A model cannot be found, read, or used."""


class PromptError(KvdbError):
    """A prompt is empty or does not fit the model's context."""

    exit_code = 2
