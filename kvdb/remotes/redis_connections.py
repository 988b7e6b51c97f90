"""Connections to Redis servers and clusters, and what the client's errors mean."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from redis.backoff import NoBackoff
from redis.client import Redis
from redis.cluster import RedisCluster
from redis.connection import (
    Connection,
    ConnectionPool,
    HiredisRespSerializer,
    SSLConnection,
)
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterError,
    InvalidResponse,
    NoPermissionError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from kvdb.errors import UsageError
from kvdb.remotes.redis import Address, secret_variable
from kvdb.remotes.remote import RemoteConfig, RemoteError, RemoteRefused, RemoteUnreachable

READ_BYTES = 256 << 10
OPTIONS = ("ca", "cert", "cluster", "key", "max_bytes", "ttl")
DENIED = (AuthenticationError, AuthorizationError, NoPermissionError)


class Value(NamedTuple):
    """The value of a SET: ``buffers`` one after another, sent as they lie."""

    buffers: Sequence[memoryview]


class Packer(HiredisRespSerializer):
    """Commands as bytes to send, as the client packs them, with Values not copied."""

    def pack(self, *args: Any) -> list[Any]:
        place = next((i for i, arg in enumerate(args) if isinstance(arg, Value)), None)
        if place is None:
            packed: list[Any] = super().pack(*args)
            return packed
        buffers = args[place].buffers
        head = b"*%d\r\n" % len(args) + b"".join(map(_bulk, args[:place]))
        head += b"$%d\r\n" % sum(buffer.nbytes for buffer in buffers)
        return [head, *buffers, b"\r\n" + b"".join(map(_bulk, args[place + 1 :]))]


def _bulk(arg: str | int) -> bytes:
    data = str(arg).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


class PlainConnection(Connection):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, command_packer=Packer())  # type: ignore[no-untyped-call]


class TlsConnection(SSLConnection):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, command_packer=Packer())


class Pool(ConnectionPool):
    """Of our connections: a cluster's client takes a class of pools, but not one of connections."""

    def __init__(self, connection_class: type[Connection] = Connection, **kwargs: Any) -> None:
        tls = issubclass(connection_class, SSLConnection)
        super().__init__(TlsConnection if tls else PlainConnection, **kwargs)


def connect(config: RemoteConfig, address: Address) -> Redis | RedisCluster:
    """A client whose server answered. Raises UsageError for an option that is none, RemoteError
    where the server cannot be used."""
    settings = _settings(config)
    wants_cluster = _cluster_option(config.options)
    kind = SSLConnection if config.scheme == "rediss" else Connection
    pool = Pool(kind, host=address.host, port=address.port, db=address.db, **settings)
    single = Redis.from_pool(pool)
    try:
        cluster = _is_cluster(single) if wants_cluster is None else wants_cluster
        if not cluster:
            single.ping()
            return single
        if address.db:
            raise UsageError("A Redis cluster has no databases: leave the number out of the URL.")
        single.close()
        return RedisCluster(
            url=f"{config.scheme}://{address}",
            connection_pool_class=Pool,
            retry=Retry(NoBackoff(), 0),
            **settings,
        )
    except (RedisError, RedisClusterException, OSError) as error:
        single.close()
        raise remote_error(error, address) from error


def _is_cluster(client: Redis) -> bool:
    try:
        return client.info("cluster").get("cluster_enabled") == 1
    except NoPermissionError:
        return False


def _cluster_option(options: Mapping[str, str]) -> bool | None:
    text = options.get("cluster")
    if text not in (None, "true", "false"):
        raise UsageError(f"The option cluster of a Redis remote is true or false, not {text!r}.")
    return None if text is None else text == "true"


def _settings(config: RemoteConfig) -> dict[str, Any]:
    for name in config.options:
        if name not in OPTIONS:
            raise UsageError(f"A Redis remote has no option {name!r}; it has {', '.join(OPTIONS)}.")
    settings: dict[str, Any] = {
        "username": config.secrets.get("username"),
        "password": config.secrets.get("password"),
        "protocol": 2,
        "socket_timeout": config.timeout_seconds,
        "socket_connect_timeout": config.timeout_seconds,
        "socket_keepalive": True,
        "socket_read_size": READ_BYTES,
        "client_name": "kvdb",
    }
    files = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
    for name, setting in files.items():
        if name in config.options:
            if config.scheme != "rediss":
                raise UsageError(f"The option {name} is for rediss:// (TLS) only.")
            if not Path(config.options[name]).is_file():
                raise UsageError(f"There is no file {config.options[name]} (option {name}).")
            settings[setting] = config.options[name]
    return settings


def denied(error: BaseException) -> bool:
    return isinstance(error, DENIED) or "CERTIFICATE" in str(error).upper()


def remote_error(error: BaseException, address: Address) -> RemoteError:
    """What an error of the client means, in one sentence."""
    where = f"The Redis server at {address}"
    text = str(error).partition("\n")[0].strip().rstrip(".")
    if isinstance(error, NoPermissionError):
        return RemoteRefused(f"{where} does not let this user do that: {text}.")
    if isinstance(error, DENIED):
        variable = secret_variable(address.name)
        return RemoteRefused(f"{where} wants a user and password that it knows: set {variable}.")
    if isinstance(error, ReadOnlyError):
        return RemoteRefused(f"{where} is a read-only replica: name the primary.")
    if isinstance(error, ssl.SSLError) or "CERTIFICATE" in text.upper():
        return RemoteRefused(f"{where} has no certificate to be trusted, see option ca: {text}.")
    if isinstance(error, BusyLoadingError):
        return RemoteUnreachable(f"{where} is still loading its data.")
    if isinstance(error, TimeoutError):
        return RemoteUnreachable(f"{where} did not answer in time.")
    if isinstance(error, (ClusterError, RedisClusterException)):
        return RemoteUnreachable(f"The Redis cluster at {address} is not whole: {text}.")
    if isinstance(error, InvalidResponse):
        return RemoteUnreachable(f"What answers at {address} is no Redis server.")
    if isinstance(error, ResponseError):
        return RemoteRefused(f"{where} refuses: {text}.")
    return RemoteUnreachable(f"{where} cannot be reached: {text}.")
