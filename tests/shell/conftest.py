"""Fixtures: a store with history whose names are hostile, and a session on it without a child."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvdb
from kvdb import RequestRecord
from kvdb.sandbox import SqlResult
from kvdb.shell.session import Session
from kvdb.store import Store
from tests.support import open_namespace, put_all, random_tokens

NASTY = "evil\x1b[31m\x9b\0😀"
NOW = 1_800_000_000_000_000
NO_TEXT: Callable[[int], None] = lambda _namespace: None  # noqa: E731 - short for its type


@pytest.fixture(scope="module")
def lived_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prompts that fork after two blocks, one hit more than the others; four requests."""
    path = tmp_path_factory.mktemp("shell") / "store"
    with kvdb.open(path, min_free_bytes=0) as store:
        namespace = open_namespace(store, weights=NASTY)
        first = random_tokens(3, 64)
        put_all(store, namespace, first)
        put_all(store, namespace, np.concatenate([first[:32], random_tokens(4, 40)]))
        for number, (restored, ms) in enumerate([(0, 900.0), (32, 400.0), (0, 1500.0), (64, 1.0)]):
            store.record(
                RequestRecord(
                    NOW + number,
                    namespace.id,
                    64,
                    restored,
                    0,
                    64 - restored,
                    5,
                    "full" if restored == 64 else "partial" if restored else "none",
                    tenant=NASTY,
                    miss_reason=None if restored == 64 else "new",
                    prefill_ms=ms,
                    first_token_ms=ms + 1,
                )
            )
        store.flush()
    return path


class InProcess:
    """Runs statements in this process; ``ran`` says which."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ran: list[str] = []

    def run(self, sql: str, params: Any = (), **limits: Any) -> SqlResult:
        self.ran.append(sql)
        return self._store.sql(sql, params, **limits)


@pytest.fixture
def shown() -> list[str]:
    """What the session showed and said, in order."""
    return []


@pytest.fixture
def session(lived_in: Path, shown: list[str]) -> Iterator[Session]:
    with kvdb.open(lived_in, read_only=True) as store:
        yield Session(store, InProcess(store), shown.append, shown.append, NO_TEXT)
