"""Remotes that are really there: each is started once a session, on loopback."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvdb.remotes.registry import open_remote
from kvdb.remotes.remote import Remote, RemoteConfig

# Kind → fixture that gives a RemoteConfig of an empty place of its own.
KINDS = {"folder": "folder_config"}
Place = Callable[[], RemoteConfig]


@pytest.fixture
def folder_config(tmp_path: Path) -> RemoteConfig:
    folder = tmp_path / uuid.uuid4().hex
    folder.mkdir()
    return RemoteConfig("team", folder.as_uri())


@pytest.fixture(params=KINDS)
def config(request: pytest.FixtureRequest) -> RemoteConfig:
    """An empty remote of each kind in turn."""
    found: RemoteConfig = request.getfixturevalue(KINDS[request.param])
    return found


@pytest.fixture
def remote(config: RemoteConfig) -> Iterator[Remote]:
    opened = open_remote(config)
    yield opened
    opened.close()
