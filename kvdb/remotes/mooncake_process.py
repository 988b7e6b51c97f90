"""Mooncake's native client in a process of its own.

It writes to stderr, waits 90 s for a master that is not there and as long as one hangs, and a call
after its close is a segmentation fault. What hangs is killed, and started again with the
next call.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvdb.remotes.remote import RemoteRefused, RemoteUnreachable

LANES = 2
# To load Python and the client, which waits for no network.
START_SECONDS = 20.0
CHILD = Path(__file__).with_name("mooncake_child.py")


class Lane:
    """One request at a time, and the window of shared memory that its objects pass through."""

    def __init__(self, process: MooncakeProcess, connection: Connection, window: mmap.mmap) -> None:
        self._process = process
        self.connection = connection
        self.window = memoryview(window)

    def call(self, action: str, items: Sequence[object]) -> list[int]:
        """Raises RemoteUnreachable; then the process is no more."""
        answer: list[int] = self._process.exchange(
            self.connection, json.dumps([action, items]).encode()
        )
        return answer

    def close(self) -> None:
        self.connection.close()


class MooncakeProcess:
    """Started by its constructor, which raises RemoteUnreachable or RemoteRefused."""

    def __init__(self, settings: dict[str, Any], window_bytes: int, timeout_seconds: float) -> None:
        self._name = settings["master"]
        self._timeout_seconds = timeout_seconds
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        self._lanes: list[Lane] = []
        theirs: list[int] = []
        windows: list[int] = []
        try:
            for number in range(LANES):
                ours, their = socket.socketpair()
                theirs.append(their.detach())
                windows.append(os.memfd_create(f"kvdb-mooncake-{number}"))
                os.ftruncate(windows[-1], window_bytes)
                window = mmap.mmap(windows[-1], window_bytes)
                self._lanes.append(Lane(self, Connection(ours.detach()), window))
            words = {
                **settings,
                "sockets": theirs,
                "windows": windows,
                "window_bytes": window_bytes,
            }
            self._process = subprocess.Popen(
                # -P: beside the program lie modules with the names of the packages they need.
                [sys.executable, "-P", str(CHILD), json.dumps(words)],
                pass_fds=[*theirs, *windows],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={k: v for k, v in os.environ.items() if not k.startswith("KVDB_REMOTE_")},
                start_new_session=True,  # Ctrl-C is for us; it ends when we do
            )
        finally:
            for fd in (*theirs, *windows):
                os.close(fd)
        first = self._lanes[0].connection
        if missing := self.exchange(first, seconds=START_SECONDS):
            self.kill()
            raise RemoteRefused(
                f"Mooncake's client cannot run here ({missing}): on Debian and Ubuntu install "
                "libcurl4, libibverbs1, librdmacm1 and libnuma1."
            )
        if code := self.exchange(first):
            self.kill()
            raise RemoteUnreachable(
                f"The Mooncake client could not join {self._name} (its code is {code}): is the "
                "metadata server named by the option metadata?"
            )
        for lane in self._lanes:
            self._free.put(lane)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane of one's own, when one is free."""
        try:
            lane = self._free.get(timeout=self._timeout_seconds)
        except queue.Empty:
            raise self._late() from None
        try:
            yield lane
        finally:
            self._free.put(lane)

    def exchange(
        self, connection: Connection, request: bytes | None = None, seconds: float | None = None
    ) -> Any:
        """Send a request, and wait for what comes back for as long as a call may take."""
        try:
            if request is not None:
                connection.send_bytes(request)
            if not connection.poll(seconds or self._timeout_seconds):
                self.kill()
                raise self._late()
            return json.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.kill()
            raise RemoteUnreachable(
                f"The client of Mooncake's master at {self._name} crashed "
                f"(exit status {self._process.returncode})."
            ) from error

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """The process sees the lanes end, says good-bye to the master, and ends in seconds."""
        for lane in self._lanes:
            lane.close()
        threading.Thread(target=self._process.wait, daemon=True).start()

    def _late(self) -> RemoteUnreachable:
        return RemoteUnreachable(f"Mooncake's master at {self._name} did not answer in time.")
