"""The app against its own OpenAPI page: whatever schemathesis makes of it is answered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from engine.http.service import Limits
from tests.http.guarded import Guarded, guarded

SECONDS = 20  # what one request may take, on a machine that is busy
# Fields that hardly anything random fits, and names of what there is.
FITTING: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hi"}],
    "prompt": "The quick brown fox jumps over the lazy dog.",
    "input": "Hi",
    "max_tokens": 4,
    "max_output_tokens": 4,
    "tokens": [5] * 40,
    "sql": "SELECT count(*) FROM requests",
    "role": "tenant",
    "tenant": "another",
    "request_id": 1,
}
PLACES: dict[str, Any] = {"name": "kept", "job_id": 1, "key_id": 99, "response_id": "resp_1"}
HELD = """SELECT count(*) FROM blocks AS b WHERE refs > 0
AND NOT EXISTS (SELECT 1 FROM blocks AS child WHERE child.parent_id = b.id)
AND NOT EXISTS (SELECT 1 FROM sequences WHERE tip_id = b.id)"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("served"), limits=Limits(max_tokens=8)) as started:
        body = {"name": "kept", "model": "tiny", "tokens": FITTING["tokens"]}
        started.get("POST", "/v1/kvdb/caches", body, key="admin")
        yield started


def operations(server: Guarded) -> list[Any]:
    document = server.get("GET", "/openapi.json", key="admin")
    schema = schemathesis.openapi.from_dict(document)
    return [found.ok() for found in schema.get_all_operations()]


def fit(case: Case, place: int) -> None:
    """Of a random request make one that could succeed but for a random field, if that."""
    if isinstance(case.body, dict):
        others = sorted(set(case.body) - set(FITTING))
        kept = {*FITTING, *others[place : place + 1]}
        given = {key: FITTING.get(key, value) for key, value in case.body.items() if key in kept}
        case.body.clear()
        case.body.update(given)
    for name in case.path_parameters or ():
        case.path_parameters[name] = PLACES.get(name, "tiny")


def weight(operation: Any) -> int:
    """Bodies of dialects have most to get wrong, and what has nothing to fill in nothing."""
    if not (operation.body or operation.path_parameters or operation.query):
        return 0
    return 3 if operation.body and not operation.path.startswith("/v1/kvdb") else 1


def check(server: Guarded, examples: int) -> None:
    """Ask ``examples`` times at least, right and wrong, spread over all operations."""
    known = operations(server)
    each = math.ceil(examples / sum(map(weight, known)))
    asked: dict[str, list[int]] = {}
    for operation in known:
        asked[operation.label] = statuses(server, operation, weight(operation) * each)
    print(*asked.items(), sep="\n")
    assert sum(map(len, asked.values())) >= examples
    good = [label for label, codes in asked.items() if min(codes) < 300]
    assert len(good) > len(known) * 0.6, set(asked) - set(good)
    healthy(server)


def statuses(server: Guarded, operation: Any, examples: int) -> list[int]:
    """What a number of random requests were answered."""
    admin, codes = server.keys["admin"], []
    own = {str(key.key.id) for key in server.keys.values()}
    modes = [GenerationMode.POSITIVE] + [GenerationMode.NEGATIVE] * (examples > 0)

    @seed(6)
    @settings(
        max_examples=max(examples, 1),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.one_of(operation.as_strategy(generation_mode=mode) for mode in modes),
        st.none() | st.integers(0, 9),
    )
    def ask(case: Case, place: int | None) -> None:
        if place is not None:
            fit(case, place)
        if str((case.path_parameters or {}).get("key_id")) in own:
            return  # we go on with it
        answer = case.call(
            base_url=f"http://127.0.0.1:{server.port}",
            headers={"authorization": f"Bearer {admin.text}"},
            timeout=SECONDS,
        )
        assert answer.status_code < 500, (case.as_curl_command(), answer.text)
        codes.append(answer.status_code)

    ask()
    return codes


def healthy(server: Guarded) -> None:
    assert server.call("GET", "/health").json() == {"live": True, "ready": True}
    asked = {key: FITTING[key] for key in ("model", "messages", "max_tokens")}
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
