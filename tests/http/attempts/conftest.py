"""Servers that are attacked: with keys and without. After each attempt they are healthy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvdb.keys import revoke_key
from tests.http.attempts.asking import CHAT, MAX_BODY, SECRET, TIMES, Start
from tests.http.guarded import Guarded, guarded


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExitStack]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVDB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield stack


@pytest.fixture(scope="package")
def start(stack: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Start:
    def begin(**options: Any) -> Guarded:
        return stack.enter_context(
            guarded(tmp_path_factory.mktemp("served"), max_body_bytes=MAX_BODY, **TIMES, **options)
        )

    return begin


@pytest.fixture(scope="package")
def keyed(start: Start) -> Guarded:
    """A server with keys, where tenant a has asked something and named a cache."""
    server = start()
    revoke_key(server.store, server.keys["gone"].key.id)
    body = {"name": "secret", "model": "tiny", "tokens": SECRET}
    server.get("POST", "/v1/kvdb/caches", body, key="a")
    server.get("POST", "/v1/chat/completions", CHAT, key="main")
    return server


@pytest.fixture(scope="package")
def keyless(start: Start) -> Guarded:
    """As on a new machine: no key, and loopback."""
    return start(keyed=False)


@pytest.fixture(scope="package")
def lenient(start: Start) -> Guarded:
    """With keys, and --allow-unauthenticated-inference."""
    return start(allow_unauthenticated_inference=True)


@pytest.fixture(autouse=True)
def healthy_after(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("keyed", "keyless", "lenient"):
        if name in request.fixturenames:
            server: Guarded = request.getfixturevalue(name)
            assert server.call("GET", "/health").json() == {"live": True, "ready": True}
            key = None if name == "keyless" else "main"
            assert server.call("POST", "/v1/chat/completions", CHAT, key=key).status_code == 200
