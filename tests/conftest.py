"""Fixtures: a real store in a temp folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvdb
from kvdb.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with kvdb.open(path) as opened:
        yield opened
