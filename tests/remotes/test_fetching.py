"""What was not delivered whole is lost, whatever went wrong, and whenever."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvdb
from kvdb.members import Member
from kvdb.remotes.filling import Filling
from kvdb.remotes.folder import FolderRemote
from kvdb.remotes.found import Found, ObjectName
from kvdb.remotes.remote import Get, Got, RemoteUnreachable
from kvdb.remotes.tier import Tier, attach
from kvdb.store import Store
from tests.remotes.test_tier import found, spec_of
from tests.support import BLOCK, PLAIN, open_namespace, put_all, random_tokens

BLOCKS = 6
TOKENS = random_tokens(1, BLOCKS * BLOCK)
NAMES = [ObjectName(index, None) for index in range(BLOCKS)]


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """A folder that has a prompt's blocks."""
    folder = tmp_path / "team"
    folder.mkdir()
    with kvdb.open(tmp_path / "a") as a:
        a.remotes = attach(a, [spec_of(folder)])
        namespace = open_namespace(a, PLAIN)
        put_all(a, namespace, TOKENS)
        a.remotes.stored(a.match(namespace, TOKENS).hashes)
        assert a.remotes.flush(10)
    return folder


def look_up(store: Store, remote: FolderRemote, folder: Path) -> tuple[Tier, Found]:
    store.remotes = tier = Tier(store, [(spec_of(folder), lambda: remote)], idle_seconds=0.2)
    return tier, found(tier, store.match(open_namespace(store, PLAIN), TOKENS))


def test_what_cannot_be_delivered_is_lost(tmp_path: Path, team: Path) -> None:
    def deliver(member: Member) -> None:
        if member.depth == 3:
            raise MemoryError

    with kvdb.open(tmp_path / "b") as b:
        tier, answer = look_up(b, FolderRemote(team), team)
        fetching = tier.fetching(answer, lambda _: "use")
        lost = fetching.get(dict.fromkeys(NAMES, deliver))
        assert NAMES[0] not in lost
        assert NAMES[3] in lost


def test_a_remote_that_fails_as_the_fetch_is_given_up(
    tmp_path: Path, team: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides give up what is open, each in its thread."""
    given_up, failed = threading.Event(), threading.Event()

    class Hanging(FolderRemote):
        def get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
            assert given_up.wait(10)
            raise RemoteUnreachable("Nothing answers.")

    settle = Filling.settle

    def settled(self: Filling, name: ObjectName, member: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            given_up.set()
            failed.wait(1)
        settle(self, name, member)
        if name == NAMES[-1]:
            failed.set()

    monkeypatch.setattr(Filling, "settle", settled)
    with kvdb.open(tmp_path / "b") as b:
        tier, answer = look_up(b, Hanging(team), team)
        fetching = tier.fetching(answer, lambda _: "use")
        assert fetching.get(dict.fromkeys(NAMES, lambda _: None)) == set(NAMES)
        monkeypatch.undo()
        assert fetching.filling is not None
        assert not fetching.filling.tickets
