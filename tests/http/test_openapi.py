"""The app against its own OpenAPI page: whatever schemathesis makes of it is answered."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from tests.http.guarded import Guarded, guarded

SECONDS = 20  # what one request may take, on a machine that is busy
# Where a body's model is any text, hardly one is served: half of them are made to be.
MODEL = "tiny"
HELD = """SELECT count(*) FROM blocks AS b WHERE refs > 0
AND NOT EXISTS (SELECT 1 FROM blocks AS child WHERE child.parent_id = b.id)
AND NOT EXISTS (SELECT 1 FROM sequences WHERE tip_id = b.id)"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("served")) as started:
        yield started


def operations(server: Guarded) -> list[Any]:
    document = server.get("GET", "/openapi.json", key="admin")
    schema = schemathesis.openapi.from_dict(document)
    return [found.ok() for found in schema.get_all_operations()]


def check(server: Guarded, examples: int) -> None:
    """Ask ``examples`` times, right and wrong, spread over all operations."""
    asked: dict[str, set[int]] = {}
    strategies = [
        operation.as_strategy(generation_mode=mode)
        for operation in operations(server)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        # Without anything to fill in there is nothing to get wrong.
        if mode.is_positive or operation.body or operation.path_parameters or operation.query
    ]
    key = server.keys["admin"].text

    @seed(6)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(strategies), st.booleans())
    def ask(case: Case, served: bool) -> None:
        if served and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL
        began = time.monotonic()
        answer = case.call(
            base_url=f"http://127.0.0.1:{server.port}",
            headers={"authorization": f"Bearer {key}"},
            timeout=SECONDS,
        )
        assert answer.status_code < 500, (case.as_curl_command(), answer.text)
        assert time.monotonic() - began < SECONDS
        asked.setdefault(case.operation.label, set()).add(answer.status_code)

    ask()
    print(*sorted(asked.items()), sep="\n")
    assert len(asked) > len(operations(server)) * 0.8
    assert len([label for label, codes in asked.items() if 200 in codes]) > 10
    healthy(server)


def healthy(server: Guarded) -> None:
    assert server.call("GET", "/health").json() == {"live": True, "ready": True}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    answer = httpx.post(
        f"http://127.0.0.1:{server.port}/v1/chat/completions",
        json=asked,
        headers={"x-api-key": server.keys["main"].text},
        timeout=60,
    )
    assert answer.status_code == 200
    assert server.service.running() == []
    assert server.store.flush(30)
    assert server.store.sql(HELD).rows == [(0,)]
    assert not server.store.verify().problems


def test_two_hundred_requests_of_its_own_description(server: Guarded) -> None:
    check(server, 200)


@pytest.mark.torture
def test_two_thousand_requests_of_its_own_description(server: Guarded) -> None:
    check(server, 2000)
