"""Redis servers that die, hang, fill up, refuse, or hold something else: each ends in a typed error
or answer, in time, and the next call after they are well again works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvdb.errors import UsageError
from kvdb.remotes.redis_remote import RedisRemote
from kvdb.remotes.redis_room import room_of
from kvdb.remotes.registry import open_remote
from kvdb.remotes.remote import (
    Get,
    Got,
    Put,
    PutState,
    Remote,
    RemoteConfig,
    RemoteRefused,
    RemoteUnreachable,
)
from tests.remotes.conftest import need
from tests.remotes.redis_servers import RedisCluster, RedisServer, until

SPACE = "ab" * 32
PASSWORD = "open sesame"  # noqa: S105
MB = 1 << 20
SHORT = 0.8
Start = Callable[..., RedisServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers of the test's own."""
    need("redis-server", "redis-server")
    servers: list[RedisServer] = []

    def start(*more: str, tls: bool = False) -> RedisServer:
        folder = tmp_path / str(len(servers))
        folder.mkdir()
        servers.append(RedisServer(folder, *more, tls=tls).__enter__())
        return servers[-1]

    yield start
    for server in servers:
        server.__exit__()


def key(number: int) -> str:
    return f"v1/{SPACE}/{number:06x}-{number:064x}"


def at(
    server: RedisServer | RedisCluster, timeout_seconds: float = 10.0, **options: str
) -> RemoteConfig:
    return RemoteConfig("team", server.url, options, timeout_seconds=timeout_seconds)


def put(remote: Remote, number: int, data: bytes, *, replace: bool = False) -> PutState:
    return remote.put_many([Put(key(number), [memoryview(data)], replace)])[0]


def get(remote: Remote, number: int, nbytes: int) -> Got:
    return next(iter(remote.get_many([Get(key(number), memoryview(bytearray(nbytes)))])))


def test_killed_in_the_middle_of_a_get_and_back_again(start: Start) -> None:
    server = start()
    remote = open_remote(at(server))
    data = bytes(8 * MB)
    for number in range(4):
        put(remote, number, data)
    gets = [Get(key(number), memoryview(bytearray(len(data)))) for number in range(4)]
    answers = remote.get_many(gets)
    assert next(answers).nbytes == len(data)
    server.kill()
    with pytest.raises(RemoteUnreachable):
        list(answers)
    with pytest.raises(RemoteUnreachable):
        remote.exists_many([key(1)])
    with pytest.raises(RemoteUnreachable):
        open_remote(at(server))
    with server:
        assert put(remote, 1, data) == "stored"
        assert get(remote, 1, len(data)) == Got(0, len(data))
        remote.close()
        with pytest.raises(RemoteUnreachable, match="closed"):
            get(remote, 1, len(data))


def test_one_that_hangs_takes_its_time_out_and_no_longer(start: Start) -> None:
    server = start()
    remote = open_remote(at(server, SHORT))
    put(remote, 1, b"data")
    server.pause()
    began = time.monotonic()
    with pytest.raises(RemoteUnreachable, match="in time"):
        remote.exists_many([key(1)])
    with pytest.raises(RemoteUnreachable, match="in time"):
        open_remote(at(server, SHORT))
    assert time.monotonic() - began < 3 * SHORT
    server.resume()
    assert get(remote, 1, 100) == Got(0, 4)
    remote.close()


def test_closing_ends_calls_under_way(start: Start) -> None:
    server = start()
    remote = open_remote(at(server, 60.0))
    server.pause()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(remote.exists_many, [key(1)])
        assert isinstance(remote, RedisRemote)
        pool = remote._client._client.connection_pool
        until(lambda: bool(pool._in_use_connections))  # it has asked, and waits
        remote.close()
        with pytest.raises(RemoteUnreachable):
            call.result(timeout=10)
    server.resume()


def test_a_listing_that_breaks_off_is_not_a_short_one(start: Start) -> None:
    server = start()
    remote = open_remote(at(server))
    puts = [Put(key(number), [memoryview(b"data")]) for number in range(3000)]
    remote.put_many(puts)
    with server.client as client:
        listed = []
        for count, each in enumerate(remote.list("v1/")):
            listed.append(each.key)
            if count == 600:  # it connects again, and goes on where it was
                client.client_kill_filter(_type="normal", skipme=True)
    assert set(listed) == {put.key for put in puts}
    listing = remote.list("v1/")
    next(listing)
    server.kill()
    with pytest.raises(RemoteUnreachable):
        list(listing)
    remote.close()


def test_a_server_is_not_filled_to_its_limit(start: Start) -> None:
    server = start("--maxmemory", "16mb", "--maxmemory-policy", "noeviction")
    remote = open_remote(at(server))
    states = [put(remote, number, bytes(MB)) for number in range(20)]
    stored = states.count("stored")
    assert states == ["stored"] * stored + ["full"] * (20 - stored)
    assert 8 <= stored <= 15
    assert put(remote, 0, bytes(MB)) == "present"
    with server.client as others:
        assert others.set("other", "still has room")
    assert get(remote, stored - 1, MB) == Got(0, MB)
    remote.close()


def test_a_user_without_info_and_scripts_is_told_full_by_the_server(start: Start) -> None:
    server = start("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    with server.client as admin:
        admin.execute_command("ACL", "SETUSER", "few", "on", "nopass", "~kvdb/*", "+@all")
        admin.execute_command("ACL", "SETUSER", "few", "-info", "-@scripting")
    secrets = {"username": "few", "password": "any"}
    remote = open_remote(RemoteConfig("team", server.url, secrets=secrets))
    states = [put(remote, number, bytes(MB)) for number in range(8)]
    assert {"stored", "full"} == set(states)
    assert remote.exists_many([key(n) for n in range(8)]) == [s == "stored" for s in states]
    remote.close()
    elsewhere = RemoteConfig("team", f"{server.url}/others", secrets=secrets)
    with pytest.raises(RemoteRefused):
        open_remote(elsewhere).exists_many([key(1)])


@pytest.mark.parametrize(
    ("policy", "limit", "expires", "room"),
    [
        ("noeviction", 1000, True, 850),
        ("allkeys-lru", 1000, False, None),
        ("volatile-lru", 1000, True, None),
        ("volatile-lru", 1000, False, 850),  # else others' keys would go for ours
        ("noeviction", 0, True, 1400),
    ],
)
def test_room_of_a_server(policy: str, limit: int, expires: bool, room: float | None) -> None:
    memory = {
        "maxmemory_policy": policy,
        "maxmemory": limit,
        "used_memory": 100,
        "total_system_memory": 2000,
    }
    assert room_of(memory, expires=expires) == room


def test_a_share_and_a_life_time(start: Start) -> None:
    server = start()
    remote = open_remote(at(server, max_bytes=str(3 * MB), ttl="1000"))
    states = [put(remote, number, bytes(MB)) for number in range(4)]
    assert states == ["stored", "stored", "full", "full"]
    with server.client as client:
        name = f"kvdb/{key(1)}"
        assert 990 < client.ttl(name) <= 1000
        other = open_remote(at(server, max_bytes=str(3 * MB)))
        assert put(other, 9, bytes(MB)) == "full"  # it counts what others put
        other.close()
    remote.close()


def test_a_foreign_key_under_our_name_is_neither_there_nor_free(start: Start) -> None:
    server = start()
    remote = open_remote(at(server))
    with server.client as others:
        others.lpush(f"kvdb/{key(1)}", "list")
        others.set("kvdb/v1/\udcff".encode("utf-8", "surrogateescape"), "none of ours")
    assert remote.exists_many([key(1)]) == [False]
    assert get(remote, 1, 100) == Got(0, None, "not a string")
    assert put(remote, 1, b"data") == "failed"
    assert list(remote.list("v1/")) == []
    assert put(remote, 1, b"data", replace=True) == "stored"
    remote.close()


def test_a_password_that_is_wrong_or_changes(start: Start) -> None:
    server = start("--requirepass", PASSWORD)
    for secrets in ({}, {"password": "wrong one"}):
        with pytest.raises(RemoteRefused, match="KVDB_REMOTE_TEAM_PASSWORD") as refused:
            open_remote(RemoteConfig("team", server.url, secrets=secrets))
        assert "wrong one" not in str(refused.value)
    remote = open_remote(RemoteConfig("team", server.url, secrets={"password": PASSWORD}))
    assert put(remote, 1, b"data") == "stored"
    with server.client as admin:
        admin.config_set("requirepass", "another")
        admin.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(RemoteRefused):
            remote.exists_many([key(1)])
        admin.config_set("requirepass", PASSWORD)
    assert remote.exists_many([key(1)]) == [True]
    remote.close()


def test_a_replica_takes_nothing(start: Start) -> None:
    server = start("--replicaof", "127.0.0.1", "1")
    remote = open_remote(at(server))
    with pytest.raises(RemoteRefused, match="read-only replica"):
        put(remote, 1, b"data")
    remote.close()


def test_a_certificate_that_nobody_knows(start: Start) -> None:
    server = start(tls=True)
    with pytest.raises(RemoteRefused, match="certificate"):
        open_remote(at(server))
    plain = RemoteConfig("team", server.url.replace("rediss", "redis"))
    with pytest.raises(RemoteUnreachable):
        open_remote(plain)


def test_a_cluster_whose_node_dies_and_comes_back(tmp_path: Path) -> None:
    need("redis-server", "redis-server")
    with RedisCluster(tmp_path) as cluster:
        remote = open_remote(at(cluster, SHORT))
        keys = [key(number) for number in range(30)]
        puts = [Put(name, [memoryview(b"data")]) for name in keys]
        assert remote.put_many(puts) == ["stored"] * 30
        cluster.nodes[1].kill()
        began = time.monotonic()
        with pytest.raises(RemoteUnreachable):
            remote.exists_many(keys)
        assert time.monotonic() - began < 5 * SHORT
        with cluster.nodes[1]:
            until(cluster.whole)
            there = remote.exists_many(keys)  # the node lost what it had
            assert 0 < there.count(True) < 30
            assert set(remote.put_many(puts)) == {"stored", "present"}
            cluster.nodes[2].pause()
            began = time.monotonic()
            with pytest.raises(RemoteUnreachable):
                remote.exists_many(keys)
            assert time.monotonic() - began < 5 * SHORT
            cluster.nodes[2].resume()
            until(cluster.whole)
            assert all(remote.exists_many(keys))
        remote.close()


def test_slots_that_move_are_followed(redis_cluster: RedisCluster) -> None:
    remote = open_remote(RemoteConfig("team", f"{redis_cluster.url}/moving"))
    assert remote.exists_many([key(1)]) == [False]
    with redis_cluster.nodes[0].client as client:
        slot = client.execute_command("CLUSTER", "KEYSLOT", f"moving/{key(1)}")
    redis_cluster.move(slot)
    assert put(remote, 1, b"data") == "stored"
    assert get(remote, 1, 100) == Got(0, 4)
    remote.close()


@pytest.mark.parametrize(
    ("url", "options", "secret"),
    [
        ("redis://user:hidden@127.0.0.1/0", {}, "hidden"),
        ("redis://127.0.0.1/0?password=hidden", {}, "hidden"),
        ("redis://127.0.0.1", {"password": "hidden"}, "hidden"),
        ("redis://", {}, None),
        ("redis://127.0.0.1:99999", {}, None),
        ("redis://127.0.0.1", {"ttl": "-1"}, None),
        ("redis://127.0.0.1", {"max_bytes": "much"}, None),
        ("redis://127.0.0.1", {"cluster": "maybe"}, None),
        ("redis://127.0.0.1", {"unknown": "1"}, None),
        ("redis://127.0.0.1", {"ca": __file__}, None),
        ("rediss://127.0.0.1", {"ca": "/nowhere"}, None),
    ],
)
def test_what_is_no_address(url: str, options: dict[str, str], secret: str | None) -> None:
    with pytest.raises(UsageError) as raised:
        open_remote(RemoteConfig("team", url, options))
    assert secret is None or secret not in str(raised.value)
