"""Fixtures: a real store in a temp folder, and programs that ^C reaches."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvdb
from kvdb.store import Store


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell starts what runs in the background with SIGINT ignored, and the programs that tests
    start and interrupt would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with kvdb.open(path) as opened:
        yield opened
