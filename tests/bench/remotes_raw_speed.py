"""Puts, gets and existence through a remote against the plain client of the same server.

    python -m tests.bench.remotes_raw_speed [URL] [--option K=V …] [--mb 6 24] [--total-mb 192]

Without a URL SeaweedFS is started on loopback. Keys come from KVDB_REMOTE_BENCH_…. Interleaved,
medians of rounds; "plain" is the client alone, as many requests at a time, which keeps what it got
where it came (a remote copies it into the buffers given). What was put is deleted where the plain
client is known; elsewhere it stays, below v1/ and a namespace of random digits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvdb.remotes.registry import open_remote
from kvdb.remotes.remote import Get, Put, Remote, RemoteConfig
from tests.bench.plain_clients import plain_redis

SECRETS = ("access_key_id", "secret_access_key", "session_token", "account_key", "sas_token",
           "username", "password")  # fmt: skip
EXISTENCE = 512


class Plain(NamedTuple):
    """The client alone: many objects a call, as it is best used."""

    put: Callable[[Sequence[str], bytes], object]
    get: Callable[[Sequence[str]], Sequence[int]]  # sizes
    delete: Callable[[Sequence[str]], object]


def plain_objects(remote: Remote) -> Plain:
    import obstore

    from kvdb.remotes.objects import GETS, PUTS, ObjectsRemote

    assert isinstance(remote, ObjectsRemote)
    store = remote._store
    putting, getting = ThreadPoolExecutor(PUTS), ThreadPoolExecutor(GETS)
    return Plain(
        lambda keys, data: list(putting.map(lambda key: obstore.put(store, key, data), keys)),
        lambda keys: list(getting.map(lambda key: len(obstore.get(store, key).bytes()), keys)),
        lambda keys: obstore.delete(store, list(keys)),
    )


# Scheme → plain client of an open remote.
PLAIN: dict[str, Callable[[Remote], Plain]] = {
    **dict.fromkeys(("s3", "gs", "az"), plain_objects),
    **dict.fromkeys(("redis", "rediss"), lambda remote: Plain(*plain_redis(remote))),
}


@contextmanager
def target(url: str | None, options: dict[str, str]) -> Iterator[RemoteConfig]:
    if url is not None:
        given = {name: os.environ.get(f"KVDB_REMOTE_BENCH_{name.upper()}") for name in SECRETS}
        secrets = {name: text for name, text in given.items() if text}
        yield RemoteConfig("bench", url, options, secrets, 120.0)
        return
    from tests.remotes.conftest import s3_config
    from tests.remotes.servers import Seaweed

    with tempfile.TemporaryDirectory() as folder, Seaweed(Path(folder)) as server:
        yield s3_config(server.url)


@contextmanager
def timed(times: dict[str, list[float]], what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times.setdefault(what, []).append(time.perf_counter() - start)


def measure(config: RemoteConfig, megabytes: int, total: int, rounds: int) -> None:
    remote = open_remote(config)
    plain = PLAIN[config.scheme](remote) if config.scheme in PLAIN else None
    data = os.urandom(megabytes << 20)
    count = max(1, total // megabytes)
    buffers = [memoryview(bytearray(len(data))) for _ in range(count)]
    times: dict[str, list[float]] = {}
    names: list[str] = []

    for _ in range(rounds):
        space = f"v1/{uuid.uuid4().hex * 2}"
        keys = [f"{space}/{n:06x}-{n:064x}" for n in range(count)]
        puts = [Put(key, [memoryview(data)]) for key in keys]
        gets = [Get(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]
        names += keys
        if plain is not None:
            others = [f"{space}/{n:06x}-{n + 7:064x}" for n in range(count)]
            names += others
            with timed(times, "put plain"):
                plain.put(others, data)
        with timed(times, "put remote"):
            check(remote.put_many(puts) == ["stored"] * count)
        if plain is not None:
            with timed(times, "get plain"):
                check(set(plain.get(others)) == {len(data)})
        with timed(times, "get remote"):
            check({got.nbytes for got in remote.get_many(gets)} == {len(data)})
        check(all(buffer == data for buffer in buffers))
        asked = [*keys, *(f"{space}/{n:06x}-{n:064x}" for n in range(count, EXISTENCE))]
        with timed(times, "exists"):
            check(sum(remote.exists_many(asked[:EXISTENCE])) == count)
    if plain is not None:
        plain.delete(names)
    remote.close()
    report(times, megabytes * count, f"{megabytes} MB × {count}")


def check(right: bool) -> None:
    if not right:
        raise SystemExit("The remote did not do what it was asked.")


def report(times: dict[str, list[float]], megabytes: int, title: str) -> None:
    print(title)
    for what, found in times.items():
        middle, spread = statistics.median(found), f"{min(found):.3f} to {max(found):.3f} s"
        if what == "exists":
            print(f"  {EXISTENCE} keys asked  {middle * 1000:7.1f} ms     ({spread})")
            continue
        plain = times.get(f"{what.split()[0]} plain", found)
        share = statistics.median(plain) / middle
        print(f"  {what:<10}  {megabytes / middle:7.0f} MiB/s  ×{share:.2f}  ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--option", action="append", default=[], metavar="K=V")
    parser.add_argument("--mb", type=int, nargs="+", default=[6, 24])
    parser.add_argument("--total-mb", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    options = dict(each.split("=", 1) for each in given.option)
    with target(given.url, options) as config:
        for megabytes in given.mb:
            measure(config, megabytes, given.total_mb, given.rounds)


if __name__ == "__main__":
    main()
