"""Transfers that end in the middle: killed, asked to stop, or because the remote went away."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

import kvdb
from kvdb.remotes import push, registry, runs, windows
from kvdb.remotes.folder import FolderRemote, open_folder
from kvdb.remotes.remote import Get, Got, Put, PutState, RemoteConfig, RemoteUnreachable
from kvdb.store import Store
from tests.snapshots.world import blocks, fill
from tests.support import check_prefix, random_tokens

# Small pieces, so that there is a middle; the n-th object ends the process.
CHILD = """
import os, signal, sys
from itertools import count
import kvdb
from kvdb.remotes import folder, push, runs, windows
push.PUT_OBJECTS = windows.WINDOW_OBJECTS = runs.RUN_BYTES = 2
done = count()
def killed(method):
    def call(*arguments):
        if next(done) == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*arguments)
    return call
folder.FolderRemote._get = killed(folder.FolderRemote._get)
folder.FolderRemote._put = killed(folder.FolderRemote._put)
with kvdb.open(sys.argv[1], min_free_bytes=0) as store:
    getattr(store, sys.argv[2])(sys.argv[3])
"""


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "nas"
    folder.mkdir()
    return folder


def kill(path: Path, verb: str, there: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), verb, there.as_uri()],
        check=False,
        timeout=60,
        capture_output=True,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr


def test_killed_both_ways_and_gone_on(tmp_path: Path, there: Path) -> None:
    with kvdb.open(tmp_path / "a", min_free_bytes=0) as a:
        fill(a)
        everything = blocks(a)
    kill(tmp_path / "a", "push", there)
    with kvdb.open(tmp_path / "a") as a:
        rest = a.push(there.as_uri())
        assert rest.present > 0
        assert rest.present + rest.stored == 17
        assert rest.rejected == 0
    kill(tmp_path / "b", "pull", there)
    with kvdb.open(tmp_path / "b") as b:
        some = blocks(b)
        assert 0 < len(some) < 14
        assert b.verify(data=True).ok
        more = b.pull(there.as_uri())
        assert (more.present, more.stored) == (len(some), 14 - len(some))
        assert blocks(b) == everything
        assert b.verify(data=True).ok


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (push, "PUT_OBJECTS"),
        (windows, "WINDOW_OBJECTS"),
        (runs, "RUN_BYTES"),
    ):
        monkeypatch.setattr(module, name, 2)


def after(calls: int) -> Callable[[], bool]:
    numbers = count()
    return lambda: next(numbers) >= calls


@pytest.mark.usefixtures("small_pieces")
def test_asked_to_stop(store: Store, tmp_path: Path, there: Path) -> None:
    fill(store)
    pushed = store.push(there.as_uri(), stopped=after(6))
    assert pushed.stopped == "Interrupted."
    assert 0 < pushed.stored < 17
    assert store.push(there.as_uri()).present == pushed.stored
    with kvdb.open(tmp_path / "b", min_free_bytes=0) as b:
        pulled = b.pull(there.as_uri(), stopped=after(4))
        assert pulled.stopped == "Interrupted."
        assert len(blocks(b)) == pulled.stored
        assert 0 < pulled.stored < 14
        b.pull(there.as_uri())
        assert blocks(b) == blocks(store)


class Leaving(FolderRemote):
    """A folder that goes away after some calls."""

    calls = 8

    def put_many(self, puts: Sequence[Put]) -> list[PutState]:
        self._leave()
        return super().put_many(puts)

    def get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        for got in super().get_many(gets):
            self._leave()
            yield got

    def _leave(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise RemoteUnreachable("The folder is not there any more.")


def open_leaving(config: RemoteConfig) -> Leaving:
    opened = open_folder(config)
    return Leaving(opened._path)


@pytest.mark.usefixtures("small_pieces")
def test_a_remote_that_goes_away(
    store: Store, tmp_path: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    spec = store.add_remote("team", there.as_uri(), check=False)
    with monkeypatch.context() as patch:
        patch.setitem(registry.SCHEMES, "file", (__name__, "open_leaving"))
        pushed = store.push(spec.name)
        assert pushed.stopped == "The folder is not there any more."
        assert pushed.stored > 0
    store.push(spec.name)
    with kvdb.open(tmp_path / "b", min_free_bytes=0) as b:
        with monkeypatch.context() as patch:
            patch.setitem(registry.SCHEMES, "file", (__name__, "open_leaving"))
            pulled = b.pull(there.as_uri())
        assert pulled.stopped == "The folder is not there any more."
        assert len(blocks(b)) == pulled.stored > 0
        assert b.verify(data=True).ok
        b.pull(there.as_uri())
        assert blocks(b) == blocks(store)
        for space in b.namespaces():
            for seed in (0, 1):
                check_prefix(b, space, random_tokens(seed, 100))
    row = store.sql("SELECT last_error, put > 0, put_bytes > 0 FROM remotes").rows
    assert row == [("The folder is not there any more.", 1, 1)]


def test_a_full_remote(store: Store, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)

    def full(self: FolderRemote, puts: Sequence[Put]) -> list[PutState]:
        return ["full" if "-" in put.key else "stored" for put in puts]

    monkeypatch.setattr(FolderRemote, "put_many", full)
    pushed = store.push(there.as_uri())
    assert pushed.stopped == "The remote has no room for more."
    assert pushed.stored == 0
