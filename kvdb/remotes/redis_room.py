"""How much a Redis server may still be given: one that is full hurts all who use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from kvdb.remotes.redis_client import RedisClient

# Shares of its memory limit, or where it has none of its machine's memory, up to which we fill it.
SHARE_OF_LIMIT = 0.95
SHARE_OF_MACHINE = 0.75
# A key, and what the server keeps beside a value.
KEY_BYTES = 256
COUNT_SECONDS = 300.0


class Room:
    """``max_bytes`` is what the objects of all machines may take there. They are counted by a
    listing every five minutes; between two of them this machine knows only of its own."""

    def __init__(
        self,
        client: RedisClient,
        *,
        max_bytes: int | None,
        expires: bool,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._client = client
        self._max_bytes = max_bytes
        self._expires = expires
        self._clock = clock
        self._lock = threading.Lock()
        self._used = 0
        self._counted: float | None = None

    def look(self) -> Left:
        """Ask the servers. Raises RemoteError."""
        if self._max_bytes is not None:
            with self._lock:
                now = self._clock()
                if self._counted is None or now >= self._counted + COUNT_SECONDS:
                    self._used = self._count()
                    self._counted = now
        free = {
            name: room_of(memory, expires=self._expires)
            for name, memory in self._client.memory().items()
        }
        return Left(self, self._client.server_of, free)

    def take_share(self, nbytes: int) -> bool:
        if self._max_bytes is None:
            return True
        with self._lock:
            if self._used + nbytes > self._max_bytes:
                return False
            self._used += nbytes
            return True

    def _count(self) -> int:
        return sum(
            size + KEY_BYTES
            for keys in self._client.scan("")
            for size in self._client.sizes(keys)
            if size > 0
        )


class Left:
    """What is left for one call; ``free`` has the bytes of each server that has a limit."""

    def __init__(
        self, room: Room, server_of: Callable[[str], str], free: dict[str, float | None]
    ) -> None:
        self._room = room
        self._server_of = server_of
        self._free = free

    def take(self, key: str, nbytes: int) -> bool:
        """Whether an object may be put, which then takes its room."""
        nbytes += KEY_BYTES
        server = self._server_of(key)
        free = self._free.get(server)
        if free is not None and free < nbytes:
            return False
        if not self._room.take_share(nbytes):
            return False
        if free is not None:
            self._free[server] = free - nbytes
        return True


def room_of(memory: Mapping[str, Any], *, expires: bool) -> float | None:
    """Bytes that a server may still be given; None where it makes room by evicting what is ours,
    or says too little."""
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    limit = int(memory.get("maxmemory", 0))
    used = int(memory.get("used_memory", 0))
    if limit:
        # Under a volatile policy objects that never expire push out others' that do.
        evicts = policy.startswith("allkeys") or (policy.startswith("volatile") and expires)
        return None if evicts else limit * SHARE_OF_LIMIT - used
    machine = int(memory.get("total_system_memory", 0))
    return machine * SHARE_OF_MACHINE - used if machine else None
