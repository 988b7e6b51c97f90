"""Windows: objects of a remote that are fetched at once, those of one while the last are used."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvdb.remotes.naming import BlockKey
from kvdb.remotes.packing import most_bytes
from kvdb.remotes.remote import Get, Remote, RemoteError
from kvdb.remotes.sorting import Sized
from kvdb.shards import NamespaceRecord

WINDOW_BYTES = 16 << 20
WINDOW_OBJECTS = 256


class WantedBlock(NamedTuple):
    """A block of which something is wanted: its objects, that of the required parts first."""

    hash: bytes
    objects: Sequence[Sized]


class Window(NamedTuple):
    """What came, by key: the bytes, or why they did not (None: the remote has not got them).
    ``error`` ended it early; then there are keys without an answer."""

    blocks: Sequence[WantedBlock]
    data: dict[BlockKey, memoryview]
    problems: dict[BlockKey, str | None]
    error: RemoteError | None


def fetch_windows(
    remote: Remote, record: NamespaceRecord, blocks: Iterable[WantedBlock]
) -> Iterator[Window]:
    """Fetch blocks of one namespace, in order. Each object has memory of its own, as large as the
    remote says it is, and no larger than it may be. The last window has the error, if one came."""
    waiting = _cut(blocks)
    with concurrent.futures.ThreadPoolExecutor(1, "kvdb-pull") as executor:

        def start() -> concurrent.futures.Future[Window] | None:
            wanted = next(waiting, None)
            return None if wanted is None else executor.submit(_fetch, remote, record, wanted)

        coming = start()
        while coming is not None:
            window = coming.result()
            coming = None if window.error is not None else start()
            yield window


def _cut(blocks: Iterable[WantedBlock]) -> Iterator[list[WantedBlock]]:
    window: list[WantedBlock] = []
    objects = nbytes = 0
    for block in blocks:
        window.append(block)
        objects += len(block.objects)
        nbytes += sum(sized.nbytes for sized in block.objects)
        if objects >= WINDOW_OBJECTS or nbytes >= WINDOW_BYTES:
            yield window
            window, objects, nbytes = [], 0, 0
    if window:
        yield window


def _fetch(remote: Remote, record: NamespaceRecord, blocks: Sequence[WantedBlock]) -> Window:
    window = Window(blocks, {}, {}, None)
    wanted = [sized for block in blocks for sized in block.objects]
    gets = [
        Get(
            str(key),
            np.empty(
                min(nbytes, most_bytes(record.layout, key.part, record.block_tokens)), np.uint8
            ).data,
        )
        for key, nbytes in wanted
    ]
    try:
        for got in remote.get_many(gets):
            key = wanted[got.index].key
            if got.nbytes is None:
                window.problems[key] = got.problem
            else:
                window.data[key] = gets[got.index].buffer[: got.nbytes]
    except RemoteError as error:
        return window._replace(error=error)
    return window
