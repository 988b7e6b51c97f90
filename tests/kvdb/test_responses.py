"""Kept responses: by tenant, within bounds, and as conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdb import responses
from kvdb.clock import Environment
from kvdb.opening import Options, open_store
from kvdb.responses import (
    MAX_AGE_SECONDS,
    KeptResponse,
    delete_response,
    find_conversation,
    find_response,
    keep_response,
)
from kvdb.store import Store


def keep(store: Store, id_: str, previous: str | None = None, tenant: str = "") -> None:
    keep_response(store, id_, tenant, previous, KeptResponse(f"[{id_}]", f"{{{id_}}}"))


def test_a_conversation_is_found_whole_or_not_at_all(store: Store) -> None:
    keep(store, "a")
    keep(store, "b", "a")
    keep(store, "c", "b")
    keep(store, "x", "a", tenant="other")  # it cannot come to be, and says nothing of a
    found = find_conversation(store, "c", "")
    assert found is not None
    assert [kept.input for kept in found] == ["[a]", "[b]", "[c]"]
    assert find_response(store, "c", "") == "{c}"
    for stranger in (find_response, find_conversation):
        assert stranger(store, "a", "other") is None
        assert stranger(store, "nothing", "") is None
    assert find_conversation(store, "x", "other") is None
    assert not delete_response(store, "a", "other")
    assert delete_response(store, "a", "")
    assert find_conversation(store, "c", "") is None


def test_the_oldest_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_RESPONSES", 3)
    for id_ in "abcde":
        keep(store, id_)
    keep(store, "z", tenant="other")
    assert [id_ for id_ in "abcde" if find_response(store, id_, "")] == ["c", "d", "e"]
    monkeypatch.setattr(responses, "MAX_BYTES", 13)  # each takes 6
    keep(store, "f")
    assert [id_ for id_ in "abcdef" if find_response(store, id_, "")] == ["e", "f"]
    assert find_response(store, "z", "other")


def test_they_end_with_time(path: Path) -> None:
    clock = [1e9]
    environment = Environment(now_us=lambda: int(clock[0] * 1e6), seconds=lambda: clock[0])
    with open_store(path, Options(), environment=environment) as store:
        keep(store, "a")
        clock[0] += MAX_AGE_SECONDS
        assert find_response(store, "a", "") is None
        assert find_conversation(store, "a", "") is None
        keep(store, "b", tenant="other")
        with store.database.read() as connection:
            assert connection.execute("SELECT id FROM responses").fetchall() == [("b",)]
