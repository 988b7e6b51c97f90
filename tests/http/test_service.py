"""Requests on their way: how many may wait, what a client that leaves ends, what a header asks."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from engine.http.service import Limits, State
from tests.http.conftest import Running, StartServer

# Blocks that nothing stored behind them holds, and yet something does.
HELD = """SELECT count(*) FROM blocks WHERE refs > 0 AND NOT EXISTS
(SELECT 1 FROM blocks AS child WHERE child.parent_id = blocks.id)"""
LONG = "The quick brown fox jumps over the lazy dog. " * 8


def body(text: str = LONG, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.005)


def states(server: Running) -> list[State]:
    return [running.state for running in server.service.running()]


def test_a_client_that_leaves_ends_its_request(server: Running) -> None:
    url = f"{server.url}/v1/chat/completions"
    asked = body("Leaving. " * 40, max_tokens=100_000)
    with httpx.stream("POST", url, json={**asked, "stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()  # once this is collected, httpx hangs up
        next(lines)
        until(lambda: states(server) == ["decode"])
    until(lambda: not server.service.running())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=asked, timeout=0.5)
    until(lambda: not server.service.running())
    assert server.one(HELD) == (0,)
    # What was computed until then is kept.
    assert (
        server.post("/v1/chat/completions", {**asked, "max_tokens": 1}).json()["usage"]["kvdb"][
            "computed_tokens"
        ]
        == 0
    )


STREAMING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 10_000},
    "/v1/completions": {"max_tokens": 10_000},
    "/v1/responses": {"max_output_tokens": 10_000},
    "/v1/messages": {"max_tokens": 10_000},
}


def test_a_hundred_that_leave_hold_nothing(server: Running) -> None:
    """In the midst of streams of every dialect."""
    asks = list(STREAMING.items())

    def leave(number: int) -> None:
        path, more = asks[number % 4]
        text = f"{number} " * (number % 7 + 1)
        given = {"messages": body(text)["messages"]}
        if path == "/v1/completions":
            given = {"prompt": text}
        elif path == "/v1/responses":
            given = {"input": text}
        asked = {"model": "tiny", "stream": True, **given, **more}
        with clients.stream("POST", f"{server.url}{path}", json=asked) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            for _ in range(number % 5):
                next(lines)

    limits = httpx.Limits(max_connections=8)
    with httpx.Client(timeout=60, limits=limits) as clients, ThreadPoolExecutor(8) as threads:
        list(threads.map(leave, range(100)))
    until(lambda: not server.service.running())
    assert server.one("SELECT count(*) FROM sequences WHERE name IS NULL") == (0,)
    assert server.one(HELD) == (0,)
    assert server.post("/v1/chat/completions", body(max_tokens=1)).status_code == 200


def test_beyond_those_that_may_wait_one_is_told_when_to_come_back(start: StartServer) -> None:
    server = start(limits=Limits(max_waiting=1), max_running=1)
    url = f"{server.url}/v1/chat/completions"
    asked = body("Waiting. ", max_tokens=100_000, stream=True)
    with (
        httpx.stream("POST", url, json=asked, timeout=60) as first,
        ThreadPoolExecutor(1) as threads,
    ):
        lines = first.iter_lines()
        next(lines)
        second = threads.submit(server.post, "/v1/chat/completions", body(max_tokens=1))
        until(lambda: states(server) == ["decode", "waiting"])
        refused = server.post("/v1/chat/completions", body(max_tokens=1))
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        with pytest.raises(openai.RateLimitError):
            server.client.chat.completions.create(**body(max_tokens=1))
        first.close()
        assert second.result().status_code == 200


def test_a_waiting_stream_stays_alive_and_shows_progress(start: StartServer) -> None:
    server = start(limits=Limits(keep_alive_seconds=0.05), max_running=1, step=16)
    url = f"{server.url}/v1/chat/completions"
    asked = body("Waiting. ", max_tokens=100_000, stream=True)
    with httpx.stream("POST", url, json=asked, timeout=60) as first:
        firsts = first.iter_lines()
        next(firsts)
        with httpx.stream("POST", url, json=body(max_tokens=2, stream=True), timeout=60) as second:
            lines = second.iter_lines()
            until(lambda: next(lines) == ": keep-alive")
            first.close()
            rest = [line for line in lines if line]
    usage = server.post("/v1/chat/completions", body(max_tokens=1)).json()["usage"]
    total = usage["prompt_tokens"]
    steps = [line for line in rest if line.startswith(": Processing ")]
    assert steps[1] == f": Processing 16/{total}"
    assert len(steps) > total // 16
    assert rest[-1] == "data: [DONE]"


def test_a_request_has_only_so_much_time(start: StartServer) -> None:
    server = start(limits=Limits(request_seconds=0.5), max_running=1)
    late = server.post("/v1/chat/completions", body(max_tokens=100_000))
    assert late.json()["choices"][0]["finish_reason"] == "length"
    never = server.post("/v1/chat/completions", body("New. " * 400, kvdb={"deadline_ms": 0.01}))
    assert never.status_code == 408
    assert "time" in never.json()["error"]["message"]


def test_headers_and_the_kvdb_field_say_how_to_treat_a_request(server: Running) -> None:
    def ask(text: str, **headers: str) -> dict[str, Any]:
        answer = server.post("/v1/chat/completions", body(text, max_tokens=1), **headers)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()["usage"]["kvdb"]
        return told

    text = "Treated. " * 30
    assert ask(text, **{"x-kvdb-no-store": "1"})["computed_tokens"] > 30
    assert ask(text, **{"x-kvdb-no-store": "1"})["computed_tokens"] > 30
    assert ask(text, **{"x-kvdb-tenant": "ann", "x-kvdb-ttl": "60"})["held"] is True
    row = "SELECT tenant, client FROM requests ORDER BY id DESC LIMIT 1"
    assert server.one(row)[0] == "ann"
    assert server.one(row)[1].startswith("python-httpx")
    # One tenant's state is not another's, nor that of a salt of one's own.
    assert ask(text, **{"x-kvdb-tenant": "ben"})["skip"] == "none"
    assert ask(text, **{"x-kvdb-salt": "pepper"})["skip"] == "none"
    assert ask(text, **{"x-kvdb-tenant": "ann"})["skip"] == "full"
    assert ask(text, **{"x-kvdb-salt": "pepper"})["skip"] == "full"
    for name, value in (("no-store", "perhaps"), ("ttl", "-1"), ("priority", "x"), ("ttl", "x")):
        wrong = server.post("/v1/chat/completions", body(text), **{f"x-kvdb-{name}": value})
        assert wrong.status_code == 400


def test_without_a_store_it_serves(start: StartServer) -> None:
    server = start(store=False)
    usage = server.client.chat.completions.create(**body(max_tokens=2)).usage
    assert usage is not None
    assert usage.kvdb["skip"] == "none"
    assert "miss_reason" not in usage.kvdb


def test_a_client_that_reads_nothing_is_given_up(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.http.sse.STALLED_SECONDS", 0.2)
    port = int(server.url.rpartition(":")[2])
    much = {"n": 8, "logprobs": True, "top_logprobs": 20, "logit_bias": {"1": -100}}
    asked = json.dumps(body("Stalled. ", max_tokens=4000, stream=True, **much)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(asked)
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", port))
        stalled.sendall(head + asked)
        until(lambda: states(server) == ["decode"])
        until(lambda: not server.service.running(), 60)  # the kernel takes some megabytes first
    last = server.one("SELECT generated_tokens, unstored FROM requests ORDER BY id DESC LIMIT 1")
    assert last[0] < 4000
    assert last[1] == "cancelled"
