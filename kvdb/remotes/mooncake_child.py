"""The process that runs Mooncake's native client, started by kvdb/remotes/mooncake_process.py. It
imports nothing of kvdb, and is run by its path.

Requests are JSON over the sockets given, answered in order, each socket with a window of shared
memory through which objects pass. When the other side is gone, so is this process.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

FAREWELL_SECONDS = 5.0
LOCAL_BUFFER_BYTES = 16 << 20


class Window:
    """Shared memory of one socket, known to the client, so that it transfers without copies."""

    def __init__(self, store: Any, fd: int, nbytes: int) -> None:
        self._memory = mmap.mmap(fd, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.registered: int = store.register_buffer(self.address, nbytes)


def main() -> None:
    settings = json.loads(sys.argv[1])
    lanes = [Connection(fd) for fd in settings["sockets"]]
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:  # a library of the system is missing
        lanes[0].send_bytes(json.dumps(str(error)).encode())
        return
    lanes[0].send_bytes(b"null")
    store = MooncakeDistributedStore()
    code = store.setup(
        settings["hostname"],
        settings["metadata"],
        settings["segment_bytes"],
        LOCAL_BUFFER_BYTES,
        settings["protocol"],
        settings["devices"],
        settings["master"],
    )
    windows = []
    if code == 0:
        windows = [Window(store, fd, settings["window_bytes"]) for fd in settings["windows"]]
        code = next((window.registered for window in windows if window.registered), 0)
    lanes[0].send_bytes(json.dumps(code).encode())
    if code:
        os._exit(1)
    threads = [
        threading.Thread(target=serve, args=(store, lane, window), daemon=True)
        for lane, window in zip(lanes, windows, strict=True)
    ]
    threading.excepthook = lambda _: os._exit(1)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Let others know that our memory goes; the native client is not trusted to end in time, nor to
    # be taken down by the interpreter.
    farewell = threading.Thread(target=store.close, daemon=True)
    farewell.start()
    farewell.join(FAREWELL_SECONDS)
    os._exit(0)


def serve(store: Any, lane: Connection, window: Window) -> None:
    actions: dict[str, Callable[[Any, Window, list[Any]], list[int]]] = {
        "exists": exists,
        "sizes": sizes,
        "get": get,
        "put": put,
        "replace": replace,
    }
    while True:
        try:
            action, items = json.loads(lane.recv_bytes())
        except (EOFError, OSError):
            return
        lane.send_bytes(json.dumps(actions[action](store, window, items)).encode())


def exists(store: Any, window: Window, keys: list[str]) -> list[int]:
    found: list[int] = store.batch_is_exist(keys)
    return found


def sizes(store: Any, window: Window, keys: list[str]) -> list[int]:
    """Bytes of each; 0 where there is none, or an error's code."""
    answers = exists(store, window, keys)
    there = [key for key, answer in zip(keys, answers, strict=True) if answer == 1]
    replicas = store.batch_get_replica_desc(there) if there else {}
    return [
        size_of(store, key, replicas.get(key, ())) if answer == 1 else answer
        for key, answer in zip(keys, answers, strict=True)
    ]


def size_of(store: Any, key: str, replicas: Any) -> int:
    for replica in replicas:
        if replica.is_memory_replica():
            size: int = replica.get_memory_descriptor().buffer_descriptor.size
            return size
    return int(store.get_size(key))


def get(store: Any, window: Window, items: list[tuple[str, int, int]]) -> list[int]:
    got: list[int] = store.batch_get_into(*columns(window, items))
    return got


def put(store: Any, window: Window, items: list[tuple[str, int, int]]) -> list[int]:
    codes: list[int] = store.batch_put_from(*columns(window, items))
    return codes


def replace(store: Any, window: Window, items: list[tuple[str, int, int]]) -> list[int]:
    codes: list[int] = store.batch_upsert_from(*columns(window, items))
    return codes


def columns(
    window: Window, items: list[tuple[str, int, int]]
) -> tuple[list[str], list[int], list[int]]:
    """Keys, addresses and sizes of items of key, place in the window, and size."""
    keys, places, nbytes = zip(*items, strict=True)
    return list(keys), [window.address + place for place in places], list(nbytes)


if __name__ == "__main__":
    main()
