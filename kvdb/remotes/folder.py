"""A folder as a remote, such as one on a network drive: ``file:///mnt/nas/kvdb``.

A file is written under another name, synced, and then linked to its own, so that it is there whole
or not at all, and the first of two writers wins.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvdb.durable import FileSystem, write_all
from kvdb.errors import UsageError
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

THREADS = 4
TEMPORARY = "kvdb-tmp"
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
    return FolderRemote(path)


class FolderRemote:
    """See :class:`kvdb.remotes.remote.Remote`. Keys are paths below ``path``; the objects of a
    namespace lie in 256 folders by the last two digits of their hash."""

    def __init__(self, path: Path, fs: FileSystem | None = None) -> None:
        self._path = path
        self._fs = fs or FileSystem()
        self._threads = ThreadPoolExecutor(THREADS, "kvdb-folder")

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        self._check()
        return [self._place(key).is_file() for key in keys]

    def get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        self._check()
        yield from self._threads.map(self._get, range(len(gets)), gets)

    def put_many(self, puts: Sequence[Put]) -> list[PutState]:
        self._check()
        return list(self._threads.map(self._put, puts))

    def list(self, prefix: str) -> Iterator[Listed]:
        self._check()
        for folder, _, names in os.walk(self._path):
            relative = Path(folder).relative_to(self._path)
            for name in names:
                key = _key(relative / name)
                if key.startswith(prefix) and TEMPORARY not in name:
                    with suppress(OSError):  # it went meanwhile
                        yield Listed(key, (Path(folder) / name).stat().st_size)

    def close(self) -> None:
        self._threads.shutdown()

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
            fd = os.open(self._place(get.key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return Got(index, None)
        except OSError as error:
            return Got(index, None, error.strerror or "unreadable")
        try:
            size = os.fstat(fd).st_size
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
        temp = place.with_name(f"{place.name}.{uuid.uuid4().hex}.{TEMPORARY}")
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
