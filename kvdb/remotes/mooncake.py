"""Mooncake Store as a remote: ``mooncake://master:port/prefix``. Linux only.

Objects lie in memory that clients lend: others', or ours by the option ``segment_bytes``, which is
gone when this program ends. The master evicts what was not asked for lately; what was asked for is
kept some seconds, so that what exists can be got.
"""

from __future__ import annotations

import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from importlib.util import find_spec
from itertools import islice
from typing import Any
from urllib.parse import unquote, urlsplit

from kvdb.errors import UsageError
from kvdb.remotes.mooncake_process import LANES, MooncakeProcess
from kvdb.remotes.remote import (
    Get,
    Got,
    Listed,
    Put,
    PutState,
    Remote,
    RemoteConfig,
    RemoteError,
    RemoteUnreachable,
)

DEFAULT_PORT, METADATA_PORT, ADMIN_PORT = 50051, 8080, 9003
DEFAULT_PREFIX = "kvdb"
DEFAULT_WINDOW_BYTES = 128 << 20
BATCH_BYTES = 32 << 20
PAGE_KEYS = 512
OPTIONS = (
    "admin", "buffer_bytes", "devices", "hostname", "metadata", "protocol", "segment_bytes"
)  # fmt: skip
# Mooncake's codes (mooncake-store/include/types.h).
NO_SPACE, UNREACHABLE = -200, -900


def open_mooncake(config: RemoteConfig) -> Remote:
    """Raises UsageError for an address or option that is none, RemoteError where the master cannot
    be reached."""
    parts = urlsplit(config.url)
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError:
        port = 0
    if not parts.hostname or not port or parts.username or parts.query or parts.fragment:
        raise UsageError("A Mooncake remote's URL is mooncake://MASTER:PORT/PREFIX.")
    for name in config.options:
        if name not in OPTIONS:
            raise UsageError(
                f"A Mooncake remote has no option {name!r}; it has {', '.join(OPTIONS)}."
            )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    options = config.options
    settings = {
        "master": f"{host}:{port}",
        "hostname": options.get("hostname") or _own_address(parts.hostname, port),
        "metadata": options.get("metadata", f"http://{host}:{METADATA_PORT}/metadata"),
        "protocol": options.get("protocol", "tcp"),
        "devices": options.get("devices", ""),
        "segment_bytes": _bytes(config, "segment_bytes", 0),
    }
    window_bytes = _bytes(config, "buffer_bytes", DEFAULT_WINDOW_BYTES)
    admin = options.get("admin", f"http://{host}:{ADMIN_PORT}").rstrip("/")
    if not admin.startswith(("http://", "https://")):
        raise UsageError(f"The option admin is the master's HTTP address, not {admin!r}.")
    if sys.platform != "linux" or find_spec("mooncake") is None:
        raise UsageError(
            "mooncake:// needs Linux and the package mooncake-transfer-engine-non-cuda: "
            "pip install 'kvdb[mooncake]'."
        )
    prefix = "/".join(unquote(part) for part in parts.path.split("/") if part)
    remote = MooncakeRemote(
        settings, window_bytes, admin, prefix or DEFAULT_PREFIX, config.timeout_seconds
    )
    try:
        remote.exists_many(["v1/"])  # whoever opens it wants to know now
    except RemoteError:
        remote.close()
        raise
    return remote


class MooncakeRemote:
    """See :class:`kvdb.remotes.remote.Remote`. Objects larger than the option ``buffer_bytes`` are
    neither got nor put. ``list`` asks the master's HTTP server, named by the option ``admin``."""

    def __init__(
        self,
        settings: dict[str, Any],
        window_bytes: int,
        admin: str,
        prefix: str,
        timeout_seconds: float,
    ) -> None:
        self._settings = settings
        self._window_bytes = window_bytes
        self._admin = admin
        self._prefix = prefix + "/"
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._process: MooncakeProcess | None = None
        self._threads = ThreadPoolExecutor(LANES, "kvdb-mooncake")
        self._closed = False

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        return [answer == 1 for answer in self._ask("exists", keys)]

    def get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        jobs = []
        for index, (get, size) in enumerate(
            zip(gets, self._ask("sizes", [get.key for get in gets]), strict=True)
        ):
            if size <= 0:
                yield Got(index, None, f"code {size}" if size else None)
            elif size > min(get.buffer.nbytes, self._window_bytes):
                yield Got(index, None, "too large")
            else:
                jobs.append((index, size))
        futures = [self._threads.submit(self._get, gets, batch) for batch in _batches(jobs)]
        try:
            for done in as_completed(futures):
                yield from done.result()
        finally:  # nobody writes into buffers that were given back
            for future in futures:
                future.cancel()
            wait(futures)

    def put_many(self, puts: Sequence[Put]) -> list[PutState]:
        states: list[PutState] = ["failed"] * len(puts)
        jobs: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for index, (put, answer) in enumerate(
            zip(puts, self._ask("exists", [put.key for put in puts]), strict=True)
        ):
            nbytes = sum(buffer.nbytes for buffer in put.buffers)
            if answer == 1 and not put.replace:
                states[index] = "present"
            elif 0 < nbytes <= self._window_bytes:
                jobs[put.replace].append((index, nbytes))
        for replace, some in jobs.items():
            for batch in _batches(some):
                for (index, _), state in zip(batch, self._put(puts, batch, replace), strict=True):
                    states[index] = state
        return states

    def list(self, prefix: str) -> Iterator[Listed]:
        names = self._names(self._prefix + prefix)
        while keys := list(islice(names, PAGE_KEYS)):
            for key, size in zip(keys, self._ask("sizes", keys), strict=True):
                if size > 0:
                    yield Listed(key, size)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
        self._threads.shutdown()
        if process is not None:
            process.close()

    def _running(self) -> MooncakeProcess:
        """Started where none runs. Whoever comes meanwhile does not wait longer than for a call."""
        if not self._lock.acquire(timeout=self._timeout_seconds):
            raise RemoteUnreachable(
                f"Mooncake's client did not start in {self._timeout_seconds} s."
            )
        try:
            if self._closed:
                raise RemoteUnreachable("This remote was closed.")
            if self._process is None or not self._process.lives:
                self._process = MooncakeProcess(
                    self._settings, self._window_bytes, self._timeout_seconds
                )
            return self._process
        finally:
            self._lock.release()

    def _ask(self, action: str, keys: Sequence[str]) -> Sequence[int]:
        answers: list[int] = []
        for start in range(0, len(keys), PAGE_KEYS):
            page = [self._prefix + key for key in keys[start : start + PAGE_KEYS]]
            with self._running().lane() as lane:
                answers += self._checked(lane.call(action, page))
        return answers

    def _get(self, gets: Sequence[Get], batch: Sequence[tuple[int, int]]) -> Sequence[Got]:
        items, place = [], 0
        for index, size in batch:
            items.append((self._prefix + gets[index].key, place, size))
            place += size
        answers = []
        with self._running().lane() as lane:
            counts = self._checked(lane.call("get", items))
            for (index, size), (_, place, _), count in zip(batch, items, counts, strict=True):
                if count == size:
                    gets[index].buffer[:size] = lane.window[place : place + size]
                    answers.append(Got(index, size))
                else:
                    problem = f"code {count}" if count < 0 else "cut short"
                    answers.append(Got(index, None, problem))
        return answers

    def _put(
        self, puts: Sequence[Put], batch: Sequence[tuple[int, int]], replace: bool
    ) -> Sequence[PutState]:
        items, place = [], 0
        with self._running().lane() as lane:
            for index, nbytes in batch:
                items.append((self._prefix + puts[index].key, place, nbytes))
                for buffer in puts[index].buffers:
                    lane.window[place : place + buffer.nbytes] = buffer
                    place += buffer.nbytes
            codes = self._checked(lane.call("replace" if replace else "put", items))
        return [
            "stored" if code == 0 else "full" if code == NO_SPACE else "failed" for code in codes
        ]

    def _checked(self, answers: Sequence[int]) -> Sequence[int]:
        if UNREACHABLE in answers:
            raise RemoteUnreachable(
                f"Mooncake's master at {self._settings['master']} cannot be reached."
            )
        return answers

    def _names(self, prefix: str) -> Iterator[str]:
        """Keys of objects that the master knows."""
        try:
            with urllib.request.urlopen(  # noqa: S310
                f"{self._admin}/get_all_keys", timeout=self._timeout_seconds
            ) as answer:
                for line in answer:
                    name = line.decode(errors="replace").rstrip("\n")
                    if name.startswith(prefix):
                        yield name.removeprefix(self._prefix)
        except (OSError, ValueError) as error:
            raise RemoteUnreachable(
                f"Mooncake's master lists its objects at its HTTP address, and {self._admin} does "
                f"not answer ({error}); name it by the option admin."
            ) from error


def _batches(jobs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Numbers and sizes in lists of at most BATCH_BYTES, or of one."""
    batches: list[list[tuple[int, int]]] = []
    room = 0
    for number, nbytes in jobs:
        if nbytes > room:
            batches.append([])
            room = BATCH_BYTES
        batches[-1].append((number, nbytes))
        room -= nbytes
    return batches


def _bytes(config: RemoteConfig, name: str, default: int) -> int:
    text = config.options.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(f"The option {name} of a Mooncake remote is bytes, not {text!r}.")
    return int(text)


def _own_address(host: str, port: int) -> str:
    """The address by which this machine reaches the master, and others reach this machine."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise RemoteUnreachable(f"There is no way to {host}: {error.strerror}.") from error
