"""How many bytes the store's directory may hold."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kvdb.driver import Connection
from kvdb.errors import StoreUnavailable, UsageError
from kvdb.shards import MAX_SHARD_BYTES

MIN_MAX_BYTES = 16 << 20
# The WAL grows to its checkpoint of 1,000 pages and the index by a few pages between two looks.
WAL_RESERVE_BYTES = (1000 * 4096) + (1 << 20)


# A block of the file system for each of up to 256 folders of shards, and for those above them.
FOLDERS_RESERVE_BYTES = 260 * 4096
MAX_ANSWER_BYTES = 64 << 20


def on_disk(nbytes: int) -> int:
    """What a file of ``nbytes`` takes on the disk, in blocks of 4 KiB."""
    return -(-nbytes // 4096) * 4096


def volume_bytes(path: Path) -> tuple[int, int]:
    """(size, free for us) of the file system under ``path``, in bytes."""
    status = os.statvfs(path)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def default_max_bytes(path: Path) -> int:
    return max(64 << 20, volume_bytes(path)[0] // 10)


def default_min_free_bytes(path: Path) -> int:
    return min(1 << 30, volume_bytes(path)[0] // 20)


@dataclass(frozen=True, slots=True)
class Limit:
    """``max_bytes`` bounds the whole directory; below ``min_free_bytes`` of free disk nothing new
    is stored."""

    root: Path
    max_bytes: int
    min_free_bytes: int

    def __post_init__(self) -> None:
        if self.max_bytes < MIN_MAX_BYTES:
            raise UsageError(f"max_bytes must be at least {MIN_MAX_BYTES}, not {self.max_bytes}.")
        if self.min_free_bytes < 0:
            raise UsageError("min_free_bytes must not be negative.")

    @property
    def shard_bytes(self) -> int:
        """The largest shard that a group commit makes."""
        return min(MAX_SHARD_BYTES, self.block_bytes)

    @property
    def block_bytes(self) -> int:
        """A block larger than this is not stored: it would push out too much else."""
        return self.max_bytes // 4

    def used(self, connection: Connection) -> int:
        """Bytes on the disk, as du counts them, of shards (live, dead and being written), of the
        files beside them, and of folders."""
        (shards,) = connection.execute(
            "SELECT value FROM counters WHERE name = 'shard_bytes'"
        ).fetchone()
        beside = wal = 0
        try:
            entries = list(os.scandir(self.root))
        except OSError as error:
            raise StoreUnavailable(f"{self.root} cannot be read: {error.strerror}.") from error
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # a temporary file of another process
            if stat.S_ISREG(status.st_mode):
                size = on_disk(status.st_size)
                if entry.name.endswith("-wal"):
                    wal += size
                else:
                    beside += size
        return int(shards) + beside + max(wal, WAL_RESERVE_BYTES) + FOLDERS_RESERVE_BYTES

    @property
    def wal_pause_bytes(self) -> int:
        """A WAL beyond this is pinned by a reader from outside: history pauses, and beyond twice
        this puts pause, until a checkpoint passes."""
        return min(16 << 20, max(WAL_RESERVE_BYTES, self.max_bytes // 4))

    @property
    def history_rows(self) -> int:
        """Rows of ``requests``, and of ``evictions``, that fit beside the payload."""
        return self.max_bytes // 16384

    @property
    def answer_bytes(self) -> int:
        """Bytes of token memory beside the payload: about one token for each KiB of state."""
        return min(MAX_ANSWER_BYTES, self.max_bytes // 64)

    def disk_allows(self, nbytes: int) -> bool:
        """True when ``nbytes`` more leave the free disk that was asked for."""
        try:
            return volume_bytes(self.root)[1] - nbytes >= self.min_free_bytes
        except OSError as error:
            raise StoreUnavailable(f"{self.root} cannot be read: {error.strerror}.") from error
