"""Mooncake masters that are not there, die, hang, or are full, and a native client that crashes:
each ends in a typed error or answer, in time, and the next call after they are well again works."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdb.errors import UsageError
from kvdb.remotes.mooncake import MooncakeRemote
from kvdb.remotes.registry import open_remote
from kvdb.remotes.remote import Get, Got, Put, PutState, Remote, RemoteConfig, RemoteUnreachable
from tests.remotes.conftest import need_mooncake
from tests.remotes.mooncake_servers import MooncakeMaster
from tests.remotes.redis_servers import until

MB = 1 << 20
SHORT = 1.0
# Python and the native client, on a busy machine.
STARTED = 3.0


def key(number: int) -> str:
    return f"v1/{'ab' * 32}/{number:06x}-{number:064x}"


def at(master: MooncakeMaster, timeout_seconds: float = 10.0, **options: str) -> RemoteConfig:
    options = {**master.options, **options}
    return RemoteConfig("team", master.url, options, timeout_seconds=timeout_seconds)


def put(remote: Remote, number: int, data: bytes) -> PutState:
    return remote.put_many([Put(key(number), [memoryview(data)])])[0]


def get(remote: Remote, number: int, nbytes: int) -> Got:
    return next(iter(remote.get_many([Get(key(number), memoryview(bytearray(nbytes)))])))


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """One of the test's own."""
    need_mooncake()
    with MooncakeMaster(tmp_path) as master:
        yield master


def test_a_master_that_dies_hangs_and_comes_back(master: MooncakeMaster) -> None:
    remote = open_remote(at(master, SHORT, segment_bytes=str(64 * MB)))
    assert put(remote, 1, b"data") == "stored"
    master.kill()
    began = time.monotonic()
    with pytest.raises(RemoteUnreachable):
        remote.exists_many([key(1)])
    with pytest.raises(RemoteUnreachable):
        get(remote, 1, 100)
    with pytest.raises(RemoteUnreachable):
        list(remote.list("v1/"))
    with pytest.raises(RemoteUnreachable):
        open_remote(at(master, SHORT))
    assert time.monotonic() - began < 3 * SHORT + STARTED
    with master:
        until(lambda: stores(remote, 2), 20)
        assert get(remote, 2, 100) == Got(0, 4)
        master.pause()
        began = time.monotonic()
        with pytest.raises(RemoteUnreachable, match="in time"):
            remote.exists_many([key(2)])
        assert time.monotonic() - began < 3 * SHORT + STARTED
        master.resume()
        until(lambda: stores(remote, 3), 20)
        remote.close()


def stores(remote: Remote, number: int) -> bool:
    """Whether an object can be put: after the master was started anew, clients take some seconds
    to offer it their memory again."""
    try:
        return put(remote, number, b"data") in ("stored", "present")
    except RemoteUnreachable:
        return False


def test_memory_that_nobody_lends_and_that_is_full(master: MooncakeMaster) -> None:
    remote = open_remote(at(master))
    assert put(remote, 1, b"data") in ("full", "failed")
    lender = open_remote(at(master, segment_bytes=str(16 * MB)))
    puts = [Put(key(number), [memoryview(bytes(4 * MB))]) for number in range(8)]
    states = remote.put_many(puts)
    assert set(states) == {"stored", "full"}
    large = Put(key(9), [memoryview(bytes(5 * MB))])
    small = open_remote(at(master, buffer_bytes=str(4 * MB)))
    assert small.put_many([large]) == ["failed"]
    lender.close()
    for each in (remote, small):
        each.close()


def test_a_client_that_crashes_takes_nobody_along(mooncake_config: RemoteConfig) -> None:
    remote = open_remote(mooncake_config)
    assert isinstance(remote, MooncakeRemote)
    assert put(remote, 1, b"data") == "stored"
    process = remote._running()
    process._process.kill()
    process._process.wait()
    assert get(remote, 1, 100) == Got(0, 4)
    with remote._running().lane() as lane, pytest.raises(RemoteUnreachable, match="crashed"):
        lane.call("an action that it does not have", [])
    assert remote.exists_many([key(1)]) == [True]
    remote.close()
    remote.close()
    with pytest.raises(RemoteUnreachable, match="closed"):
        remote.exists_many([key(1)])


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("mooncake://", {}),
        ("mooncake://127.0.0.1:99999", {}),
        ("mooncake://127.0.0.1", {"segment_bytes": "many"}),
        ("mooncake://127.0.0.1", {"unknown": "1"}),
        ("mooncake://127.0.0.1", {"admin": "file:///etc"}),
    ],
)
def test_what_is_no_address(url: str, options: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        open_remote(RemoteConfig("team", url, options))
