"""A folder as a remote, such as one on a network drive: ``file:///mnt/nas/kvdb``.

A file is written under another name, synced, and then linked to its own, so that it is there whole
or not at all, and the first of two writers wins. A network drive whose server is gone lets calls
hang, so they are made in threads that can be left behind.
"""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from kvdb.durable import FileSystem, write_all
from kvdb.errors import UsageError
from kvdb.remotes.crew import Crew
from kvdb.remotes.remote import (
    Get,
    Got,
    Listed,
    Put,
    PutState,
    RemoteConfig,
    RemoteRefused,
    RemoteUnreachable,
)

T = TypeVar("T")

THREADS = 4
# So many keys are looked for in one call of a thread.
LOOKED_FOR = 64
TEMPORARY = ".kvdb-tmp"
# Long after any put is over, on machines whose clocks differ, too.
ABANDONED_SECONDS = 86_400.0
# Others may put there what is no plain file; opening a pipe would wait for somebody to write.
OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def open_folder(config: RemoteConfig) -> FolderRemote:
    """The folder must be there: a drive that is not mounted must not become a folder of the disk
    below it."""
    parts = urlsplit(config.url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise UsageError(f"{config.url} names no folder: write file:///path/of/the/folder.")
    if config.options:
        raise UsageError(f"A folder takes no option {next(iter(config.options))!r}.")
    path = Path(unquote(parts.path))
    if not path.is_dir():
        raise RemoteRefused(f"The folder {path} is not there; make it, or mount it.")
    return FolderRemote(path, timeout_seconds=config.timeout_seconds)


class FolderRemote:
    """See :class:`kvdb.remotes.remote.Remote`. Keys are paths below ``path``; the objects of a
    namespace lie in 256 folders by the last two digits of their hash."""

    def __init__(
        self,
        path: Path,
        fs: FileSystem | None = None,
        *,
        timeout_seconds: float = 10.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._fs = fs or FileSystem()
        self._timeout = timeout_seconds
        self._now = now
        self._threads = Crew("kvdb-folder", THREADS)

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        runs = [keys[at : at + LOOKED_FOR] for at in range(0, len(keys), LOOKED_FOR)]
        found = self._in_threads([partial(self._are_there, run) for run in runs])
        return [there for run in found for there in run]

    def get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        yield from self._in_threads([partial(self._get, *each) for each in enumerate(gets)])

    def put_many(self, puts: Sequence[Put]) -> list[PutState]:
        return list(self._in_threads([partial(self._put, put) for put in puts]))

    def list(self, prefix: str) -> Iterator[Listed]:
        self._check()
        for folder, _, names in os.walk(self._path, onerror=self._unreadable):
            relative = Path(folder).relative_to(self._path)
            for name in names:
                key = _key(relative / name)
                if not key.startswith(prefix):
                    continue
                with suppress(OSError):  # it went meanwhile
                    found = (Path(folder) / name).lstat()
                    if name.endswith(TEMPORARY):
                        self._sweep(Path(folder) / name, found.st_mtime)
                    elif stat.S_ISREG(found.st_mode):
                        yield Listed(key, found.st_size)

    def close(self) -> None:
        self._threads.close()

    def _in_threads(self, calls: Sequence[Callable[[], T]]) -> Iterator[T]:
        """What calls give, in order; each may take the time-out."""
        there = self._threads.submit(self._check)
        futures = []
        try:
            there.result(self._timeout)
            futures += [self._threads.submit(call) for call in calls]
            for future in futures:
                yield future.result(self._timeout)
        except (TimeoutError, CancelledError) as error:
            raise RemoteUnreachable(
                f"The folder {self._path} did not answer within {self._timeout:g} s."
            ) from error
        finally:
            for future in futures:
                future.cancel()

    def _sweep(self, temp: Path, written_at: float) -> None:
        """Remove what a program left that was killed while it put something."""
        if self._now() - written_at > ABANDONED_SECONDS:
            temp.unlink()

    def _are_there(self, keys: Sequence[str]) -> Sequence[bool]:
        return [self._place(key).is_file() for key in keys]

    def _unreadable(self, error: OSError) -> None:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # it went meanwhile
            raise RemoteRefused(
                f"The folder {error.filename} cannot be read: {error.strerror}."
            ) from error

    def _check(self) -> None:
        if not self._path.is_dir():
            raise RemoteUnreachable(f"The folder {self._path} is not there any more.")

    def _place(self, key: str) -> Path:
        """Where an object lies; keys are of this program, and have no ``..``."""
        folder, _, name = key.rpartition("/")
        digest = name.partition(".")[0]
        return self._path / folder / digest[-2:] / name

    def _get(self, index: int, get: Get) -> Got:
        try:
            fd = os.open(self._place(get.key), OPEN)
        except (FileNotFoundError, NotADirectoryError):
            return Got(index, None)
        except OSError as error:
            return Got(index, None, error.strerror or "unreadable")
        try:
            size = os.fstat(fd).st_size
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return Got(index, None, "not a file")
            if size > get.buffer.nbytes:
                return Got(index, None, "too large")
            done = 0
            while done < size:
                count = os.preadv(fd, [get.buffer[done:size]], done)
                if not count:
                    return Got(index, None, "cut short")
                done += count
            return Got(index, size)
        except OSError as error:
            return Got(index, None, error.strerror or "unreadable")
        finally:
            os.close(fd)

    def _put(self, put: Put) -> PutState:
        place = self._place(put.key)
        if not put.replace and place.is_file():
            return "present"
        temp = place.with_name(f"{place.name}.{uuid.uuid4().hex}{TEMPORARY}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            self._write(temp, put.buffers)
            if put.replace:
                temp.replace(place)
            else:
                os.link(temp, place)
        except FileExistsError:
            return "present"
        except OSError as error:
            if error.errno in REFUSED:
                raise RemoteRefused(f"The folder {self._path} is not writable.") from error
            return "full" if error.errno in FULL else "failed"
        finally:
            with suppress(OSError):
                temp.unlink(missing_ok=True)
        return "stored"

    def _write(self, temp: Path, buffers: Sequence[memoryview]) -> None:
        fd = self._fs.create(temp)
        try:
            write_all(self._fs, fd, buffers)
            self._fs.sync(fd)
        finally:
            self._fs.close(fd)


def _key(relative: Path) -> str:
    """The key of a file: its path without the folder of two digits."""
    parts = relative.parts
    return "/".join((*parts[:-2], parts[-1]))
