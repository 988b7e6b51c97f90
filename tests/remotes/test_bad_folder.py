"""A shared folder whose server is gone, or where others put what is no file."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from kvdb.durable import FileSystem
from kvdb.remotes.folder import FolderRemote
from kvdb.remotes.remote import Get, Listed, Put, RemoteUnreachable

KEY = f"v1/{'a' * 64}/000000-{'b' * 64}"


class Hanging(FileSystem):
    """Syncing waits for a server that is gone."""

    def __init__(self) -> None:
        self.back = threading.Event()

    def sync(self, fd: int) -> None:
        self.back.wait(30)


def test_a_call_that_hangs_ends_with_its_time_out(tmp_path: Path) -> None:
    fs = Hanging()
    remote = FolderRemote(tmp_path, fs, timeout_seconds=0.1)
    with pytest.raises(RemoteUnreachable, match=r"did not answer within 0\.1 s"):
        remote.put_many([Put(KEY, [memoryview(b"state")])] * 10)
    remote.close()
    # None of them keeps the program from ending.
    assert all(each.daemon for each in threading.enumerate() if "folder" in each.name)
    fs.back.set()


def test_a_pipe_is_no_object(tmp_path: Path) -> None:
    remote = FolderRemote(tmp_path)
    assert remote.put_many([Put(KEY, [memoryview(b"state")])]) == ["stored"]
    assert list(remote.list("v1/")) == [Listed(KEY, 5)]
    (file,) = (each for each in tmp_path.rglob("*") if each.is_file())
    file.unlink()
    os.mkfifo(file)
    assert list(remote.list("v1/")) == []
    assert remote.exists_many([KEY]) == [False]
    (got,) = remote.get_many([Get(KEY, memoryview(bytearray(9)))])
    assert (got.nbytes, got.problem) == (None, "not a file")
    remote.close()


def test_what_a_killed_program_left_goes_after_a_day(tmp_path: Path) -> None:
    remote = FolderRemote(tmp_path)
    assert remote.put_many([Put(KEY, [memoryview(b"state")])]) == ["stored"]
    (file,) = (each for each in tmp_path.rglob("*") if each.is_file())
    left = file.with_name(f"{file.name}.{'0' * 32}.kvdb-tmp")
    left.write_bytes(b"sta")
    assert list(remote.list("v1/")) == [Listed(KEY, 5)]
    assert left.exists()
    later = FolderRemote(tmp_path, now=lambda: time.time() + 90_000)
    assert list(later.list("v1/")) == [Listed(KEY, 5)]
    assert not left.exists()
    assert file.exists()
    remote.close()
    later.close()
