"""``--since``: a snapshot file, the digest of an export, or a time."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvdb.errors import UsageError
from kvdb.snapshot.provenance import exported_at
from kvdb.snapshot.stream import BLOCK_NAME, Readable, TarReader

if TYPE_CHECKING:
    from kvdb.store import Store

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
AGO = re.compile(r"([0-9]{1,6})([smhdw])")
DIGEST = re.compile(r"[0-9a-f]{12,64}")


class Since(NamedTuple):
    """What an incremental export leaves out: blocks stored before ``time_us``, or in ``base``."""

    time_us: int | None
    base: frozenset[bytes] | None


def resolve(store: Store, text: str) -> Since:
    """Raises UsageError for what is none of the three, SnapshotRejected for a bad file."""
    path = Path(text)
    if path.is_file():
        with path.open("rb") as file:
            return Since(None, frozenset(_hashes(file)))
    if DIGEST.fullmatch(text):
        with store.database.read() as connection:
            time_us = exported_at(connection, text)
        if time_us is not None:
            return Since(time_us, None)
        raise UsageError(f"This store made no export of the digest {text}.")
    ago = AGO.fullmatch(text)
    if ago is not None:
        seconds = int(ago[1]) * UNITS[ago[2]]
        return Since(store.environment.now_us() - seconds * 1_000_000, None)
    try:
        return Since(int(datetime.fromisoformat(text).timestamp() * 1_000_000), None)
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"{text!r} is no snapshot file, no digest of an export, and no time such as "
            "2026-05-01, 2026-05-01T12:30 or 3d (three days ago)."
        ) from None


def _hashes(file: Readable) -> list[bytes]:
    """The blocks of a snapshot, all of which is read and checked for its frame alone."""
    reader = TarReader(file)
    found: list[bytes] = []
    while (member := reader.next()) is not None:
        reader.skip(member)
        name = BLOCK_NAME.fullmatch(member.name)
        if name is not None:
            found.append(bytes.fromhex(name[2]))
    return found
