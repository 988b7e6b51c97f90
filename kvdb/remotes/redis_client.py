"""What a remote asks of Redis, one server or a cluster, with typed answers and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from redis.client import Redis
from redis.cluster import RedisCluster
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from kvdb.remotes.redis import Address
from kvdb.remotes.redis_connections import Value, denied, remote_error
from kvdb.remotes.remote import PutState, RemoteUnreachable

PAGE_KEYS = 512
WRONG_TYPE = -1
# One reply instead of hundreds, which cost a client more than the server. Keys of one server only.
SIZES_SCRIPT = """
local sizes = {}
for i, key in ipairs(KEYS) do
  local size = redis.pcall('STRLEN', key)
  sizes[i] = type(size) == 'number' and size or -1
end
return sizes
"""
# A command's name, its key, and more.
Command = tuple[Any, ...]
T = TypeVar("T")


class RedisClient:
    """Calls raise RemoteUnreachable or RemoteRefused. Keys are those of objects; the address's
    prefix is put before them here."""

    def __init__(self, client: Redis | RedisCluster, address: Address) -> None:
        self._client = client
        self._address = address
        self._run: Callable[..., Any] = client.execute_command
        self._scripts = isinstance(client, Redis)
        self._stale = False
        self._closed = False

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Bytes of each; 0 where there is none, WRONG_TYPE where there is something else than a
        string."""
        sizes: list[int] = []
        for start in range(0, len(keys), PAGE_KEYS):
            page = [self._address.key(key) for key in keys[start : start + PAGE_KEYS]]
            sizes += self._call(self._sizes, page)
        return sizes

    def range(self, key: str, start: int, end: int) -> bytes:
        """Bytes from ``start`` up to ``end``; fewer where there are fewer."""
        (piece,) = self._pipeline([("GETRANGE", self._address.key(key), start, end - 1)])
        return piece if isinstance(piece, bytes) else b""

    def strings(self, wanted: Sequence[tuple[str, int]]) -> list[bytes]:
        """The first so many bytes of each key."""
        replies = self._pipeline(
            [("GETRANGE", self._address.key(key), 0, size - 1) for key, size in wanted]
        )
        return [reply if isinstance(reply, bytes) else b"" for reply in replies]

    def set(
        self, values: Sequence[tuple[str, Value, bool]], ttl_seconds: int | None
    ) -> list[PutState]:
        """Set keys, those without True only where there is none."""
        lifetime = ("EX", ttl_seconds) if ttl_seconds else ()
        commands = [
            ("SET", self._address.key(key), value, *(() if replace else ("NX",)), *lifetime)
            for key, value, replace in values
        ]
        return [_put_state(reply) for reply in self._pipeline(commands)]

    def scan(self, prefix: str) -> Iterator[list[str]]:
        """Keys that begin so, by pages. One may come twice while the server's table changes its
        size."""
        pattern = _escaped(self._address.key(prefix)) + "*"
        for server in self._call(self._servers):
            cursor = 0
            while True:
                scan: Callable[..., Any] = server.scan
                cursor, page = self._call(scan, cursor, pattern, PAGE_KEYS)
                yield [key for raw in page if (key := self._address.own(raw)) is not None]
                if cursor == 0:
                    break

    def memory(self) -> dict[str, dict[str, Any]]:
        """What each server that takes writes says of its memory; nothing, where we may not ask."""
        return self._call(self._memory)

    def server_of(self, key: str) -> str:
        """The name in ``memory`` of the server that a key belongs to."""
        if isinstance(self._client, RedisCluster):
            node_of: Callable[[str], Any] = self._client.get_node_from_key
            return str(node_of(self._address.key(key)).name)
        return ""

    def close(self) -> None:
        """Ends calls under way, too. Without our own mark the client would connect again."""
        self._closed = True
        if isinstance(self._client, RedisCluster):
            nodes: Callable[[], list[Any]] = self._client.get_nodes
            for node in nodes():  # which the client's own close leaves connected
                if node.redis_connection is not None:
                    node.redis_connection.connection_pool.disconnect()
        self._client.close()

    def _servers(self) -> list[Redis]:
        if isinstance(self._client, RedisCluster):
            connection: Callable[[Any], Redis] = self._client.get_redis_connection
            nodes: Callable[[], list[Any]] = self._client.get_primaries
            return [connection(node) for node in nodes()]
        return [self._client]

    def _memory(self) -> dict[str, dict[str, Any]]:
        try:
            if isinstance(self._client, RedisCluster):
                return self._client.info("memory", target_nodes=RedisCluster.PRIMARIES)
            return {"": self._client.info("memory")}
        except NoPermissionError:
            return {}

    def _sizes(self, keys: Sequence[str]) -> list[int]:
        if self._scripts:
            try:
                answer: list[int] = self._run("EVAL", SIZES_SCRIPT, len(keys), *keys)
                return answer
            except ResponseError as error:
                if not isinstance(error, NoPermissionError) and "unknown command" not in str(error):
                    raise
                self._scripts = False  # our rights, or this server, do not include them
        replies = self._replies([("STRLEN", key) for key in keys])
        return [reply if isinstance(reply, int) else WRONG_TYPE for reply in replies]

    def _pipeline(self, commands: Sequence[Command]) -> list[Any]:
        return self._call(self._replies, commands)

    def _replies(self, commands: Sequence[Command]) -> list[Any]:
        """Replies, with the errors that concern one key; others are raised."""
        if isinstance(self._client, RedisCluster):
            replies = self._cluster_replies(self._client, commands)
        else:
            replies = _pipelined(self._client, commands)
        for reply in replies:
            if isinstance(reply, Exception) and not _of_one_key(reply):
                raise reply
        return replies

    def _cluster_replies(self, cluster: RedisCluster, commands: Sequence[Command]) -> list[Any]:
        """A pipeline for each server. The client's own pipeline asks a server that hangs for each
        key once more, each with a time-out of its own."""
        if self._stale:
            cluster.nodes_manager.initialize()
            self._stale = False
        node_of: Callable[[str], Any] = cluster.get_node_from_key
        shares: dict[str, list[int]] = {}
        clients: dict[str, Redis] = {}
        for number, command in enumerate(commands):
            node = node_of(command[1])
            clients[node.name] = cluster.get_redis_connection(node)
            shares.setdefault(node.name, []).append(number)
        replies: list[Any] = [None] * len(commands)
        for name, share in shares.items():
            answers = _pipelined(clients[name], [commands[number] for number in share])
            for number, reply in zip(share, answers, strict=True):
                if isinstance(reply, (AskError, TryAgainError)):  # or MovedError: its slot moved
                    reply = self._run(*commands[number])
                replies[number] = reply
        return replies

    def _call(self, function: Callable[..., T], *args: object) -> T:
        """Once more where a connection broke: the server may have been started anew. Not after a
        time-out, which was all the time that there is."""
        if self._closed:
            raise RemoteUnreachable("This remote was closed.")
        try:
            try:
                return function(*args)
            except (ConnectionError, TimeoutError, ClusterDownError) as error:
                self._stale = True  # another server may have taken over
                if not isinstance(error, ConnectionError) or denied(error) or self._closed:
                    raise
                return function(*args)
        except (RedisError, RedisClusterException, OSError) as error:
            raise remote_error(error, self._address) from error
        except (AttributeError, TypeError, ValueError) as error:
            if not self._closed:
                raise
            # What the client meets when its connection is taken from it.
            raise RemoteUnreachable("This remote was closed.") from error


def _pipelined(client: Redis, commands: Sequence[Command]) -> list[Any]:
    pipeline = client.pipeline(transaction=False)
    execute: Callable[..., Any] = pipeline.execute_command
    for command in commands:
        execute(*command)
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    return replies


def _of_one_key(error: Exception) -> bool:
    return isinstance(error, OutOfMemoryError) or (
        type(error) is ResponseError and str(error).startswith("WRONGTYPE")
    )


def _put_state(reply: object) -> PutState:
    if isinstance(reply, OutOfMemoryError):
        return "full"
    if isinstance(reply, Exception):
        return "failed"
    return "stored" if reply else "present"


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in text)
