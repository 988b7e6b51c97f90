"""Attempts 12 to 15, to harm by size and time."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

import httpx
import pytest

from tests.http.attempts.asking import INFERENCE, MAX_BODY, Start, head
from tests.http.guarded import Guarded
from tests.http.serving import send_raw, status_of


def test_12_a_body_that_is_too_large(keyed: Guarded) -> None:
    # By its own word it is not even waited for.
    answer = send_raw(keyed.port, head(keyed, f"Content-Length: {MAX_BODY + 1}"))
    assert status_of(answer) == 413
    # In pieces, without a word.
    pieces = [b"1000\r\n" + b" " * 4096 + b"\r\n"] * (MAX_BODY // 4096 + 1)
    answer = send_raw(keyed.port, head(keyed, "Transfer-Encoding: chunked"), *pieces)
    assert status_of(answer) in (413, 0)  # 0: it hung up while we were still sending
    # Without a key it is not looked at.
    nobody = b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n"
    assert status_of(send_raw(keyed.port, nobody)) == 401


def test_13_a_client_that_takes_its_time(keyed: Guarded) -> None:
    began = time.monotonic()
    assert send_raw(keyed.port) == b""  # connected, and silent
    assert send_raw(keyed.port, b"GET /health HT") == b""
    unfinished = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: "
    assert send_raw(keyed.port, unfinished) == b""
    with socket.create_connection(("127.0.0.1", keyed.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status_of(connection.recv(65536)) == 200
        connection.sendall(unfinished)  # the second one on a connection
        while connection.recv(65536):
            pass
    answer = send_raw(keyed.port, head(keyed, "Content-Length: 100"), b'{"a":')
    assert status_of(answer) == 408
    answer = send_raw(keyed.port, head(keyed, "Transfer-Encoding: chunked"), b'5\r\n{"a":\r\n')
    assert status_of(answer) == 408
    assert time.monotonic() - began < 10


def test_13_bytes_that_trickle_do_not_help(keyed: Guarded) -> None:
    with socket.create_connection(("127.0.0.1", keyed.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: ")
        connection.settimeout(0.05)
        until = time.monotonic() + 10
        ended = False
        while not ended and time.monotonic() < until:
            try:
                connection.sendall(b"a")
                ended = connection.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                ended = True
        assert ended


def test_13_more_connections_than_there_are_places(start: Start) -> None:
    server = start(keyed=False, max_connections=3)
    address = ("127.0.0.1", server.port)
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(socket.create_connection(address, timeout=10))
        assert send_raw(server.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
    while True:  # until it has noticed that they are gone
        with contextlib.suppress(httpx.TransportError):
            assert server.call("GET", "/health").status_code == 200
            break


def test_14_headers_without_end(keyed: Guarded) -> None:
    bomb = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * (1 << 20)
    assert status_of(send_raw(keyed.port, bomb)) in (400, 431, 0)
    many = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: a\r\n" * 100_000
    assert status_of(send_raw(keyed.port, many)) in (400, 431, 0)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 30_000 + b"1" + b"}" * 30_000,
        b'{"model": "tiny", "messages": ' + b"[" * 65 + b"]" * 65 + b"}",
        ('{"model": "' + "[" * 50_000).encode("utf-16"),
    ],
)
def test_15_json_that_is_nested_deeply(keyed: Guarded, body: bytes) -> None:
    answer = send_raw(keyed.port, head(keyed, f"Content-Length: {len(body)}"), body)
    assert status_of(answer) == 400, answer
    assert b"invalid_json" in answer


# Asks for /health again and again, from a process of its own, until its input ends.
PROBE = """
import http.client, json, select, sys, time

connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
times = []
while not select.select([sys.stdin], [], [], 0)[0]:
    began = time.monotonic()
    connection.request("GET", "/health")
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read()
    times.append(time.monotonic() - began)
print(json.dumps(times))
"""


def test_health_answers_while_a_long_prefill_runs(start: Start) -> None:
    server = start(keyed=False, step=1024)
    server.call(*INFERENCE)
    probe = subprocess.Popen(
        [sys.executable, "-c", PROBE, str(server.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    slow = {"model": "tiny", "prompt": [7, 8, 9] * 1300, "max_tokens": 1}
    server.get("POST", "/v1/completions", slow)
    times = json.loads(probe.communicate("end", timeout=30)[0])
    assert len(times) > 5
    assert statistics.median(times) < 0.05  # the rest is the machine's load
    assert min(times) < 0.03  # nothing waits for a delayed ACK
