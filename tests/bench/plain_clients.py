"""Clients of in-memory stores as they come, for comparison with remotes of the same server."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from redis import Redis, RedisCluster

from kvdb.remotes.redis_remote import RedisRemote
from kvdb.remotes.remote import Remote

Put = Callable[[Sequence[str], bytes], object]
GetSizes = Callable[[Sequence[str]], Sequence[int]]
Delete = Callable[[Sequence[str]], object]


def plain_redis(remote: Remote) -> tuple[Put, GetSizes, Delete]:
    """SET of each and MGET of all; in a cluster, whose keys lie apart, GET of each."""
    assert isinstance(remote, RedisRemote)
    ours, address = remote._client._client, remote._client._address
    tls = {}
    if isinstance(ours, Redis):
        settings = ours.connection_pool.connection_kwargs
        tls = {key: value for key, value in settings.items() if key.startswith("ssl_")}
        client = Redis(
            address.host, address.port, address.db, password=settings.get("password"),
            ssl=bool(tls), **tls,
        )  # fmt: skip
    else:
        client = RedisCluster(address.host, address.port)

    def get(keys: Sequence[str]) -> list[int]:
        names = [address.key(key) for key in keys]
        if isinstance(client, RedisCluster):
            return [len(client.get(name)) for name in names]
        return [len(value) for value in client.mget(names)]

    return (
        lambda keys, data: [client.set(address.key(key), data) for key in keys],
        get,
        lambda keys: [client.delete(address.key(key)) for key in keys],
    )
