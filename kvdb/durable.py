"""temp → fsync → rename → fsync(directory): the only way bytes are published.

The file system is a parameter, so that tests can record every call and replay crashes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# At most this many buffers go into one writev (IOV_MAX is 1,024 on Linux and macOS).
IOV_MAX = 1024


class FileSystem:
    """The system calls that publishing needs. ``full`` asks for a flush of the drive's own cache
    (macOS: F_FULLFSYNC, where plain fsync stops at the drive)."""

    def __init__(self, *, full: bool = False, platform: str = sys.platform) -> None:
        self._full = full and platform == "darwin"

    def create(self, path: Path) -> int:
        """Open a new file for writing; FileExistsError when there is one."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, buffers: Sequence[memoryview]) -> int:
        return os.writev(fd, buffers)

    def sync(self, fd: int) -> None:
        """Make a file's bytes durable. An error is final: the file must be given up, since a
        second fsync on the same descriptor can succeed without the data being there."""
        if self._full:
            try:
                fcntl.fcntl(fd, 51)  # F_FULLFSYNC; the constant exists on macOS only
                return
            except OSError as error:
                if error.errno not in (errno.ENOTSUP, errno.EINVAL):
                    raise
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read_only(self, path: Path) -> None:
        path.chmod(0o400)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some file systems cannot sync a directory
                raise
        finally:
            os.close(fd)

    def make_directory(self, path: Path) -> None:
        """Create a folder (0700) durably; quiet when it exists."""
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            return
        self.sync_directory(path.parent)


def publish(fs: FileSystem, temp: Path, target: Path, chunks: Iterable[memoryview]) -> int:
    """Write ``chunks`` to ``temp``, make them durable and give them the name ``target``.

    Returns the bytes written. After a crash at any point either the whole file is at ``target``
    or nothing is. On an error both are removed and the error goes on (OSError); ``target`` must be
    a name that was never used before.
    """
    nbytes = stage(fs, temp, chunks)
    give_name(fs, temp, target)
    return nbytes


def stage(fs: FileSystem, temp: Path, chunks: Iterable[memoryview]) -> int:
    """The first half of :func:`publish`: a durable file at ``temp``, removed on an error."""
    fd = fs.create(temp)
    with _removed_on_error(fs, temp):
        try:
            nbytes = write_all(fs, fd, chunks)
            fs.sync(fd)
        finally:
            fs.close(fd)
        fs.read_only(temp)
    return nbytes


def give_name(fs: FileSystem, temp: Path, target: Path) -> None:
    """The second half of :func:`publish`."""
    with _removed_on_error(fs, temp, target):
        fs.make_directory(target.parent)
        # fsync before rename: else an empty file can stand at the final name after a power cut.
        fs.rename(temp, target)
        fs.sync_directory(target.parent)


@contextlib.contextmanager
def _removed_on_error(fs: FileSystem, *paths: Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        # The reason for the failure matters, not that of a failed clean-up of the same disk.
        for path in paths:
            with contextlib.suppress(OSError):
                fs.unlink(path)
        raise


def write_all(fs: FileSystem, fd: int, chunks: Iterable[memoryview]) -> int:
    """Write every byte of ``chunks``; short writes are resumed."""
    total = 0
    pending: list[memoryview] = []
    for chunk in chunks:
        if chunk.nbytes:
            pending.append(chunk.cast("B"))
        if len(pending) == IOV_MAX:
            total += _drain(fs, fd, pending)
            pending = []
    return total + _drain(fs, fd, pending)


def _drain(fs: FileSystem, fd: int, pending: list[memoryview]) -> int:
    total = 0
    while pending:
        written = fs.write(fd, pending)
        total += written
        while pending and written >= pending[0].nbytes:
            written -= pending[0].nbytes
            pending.pop(0)
        if pending and written:
            pending[0] = pending[0][written:]
    return total
