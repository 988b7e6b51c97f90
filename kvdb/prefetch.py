"""Blocks as raw bytes in chain order, read ahead by the reader threads within a window.

For memory that ``preadv`` cannot reach (a GPU without shared memory): what is read lies in staging
buffers that are used again, so a long chain costs a window of host memory, and its page faults
once; the page cache keeps parts that are stored raw as well as the RAM tier could. Where the final
memory is at hand, :func:`kvdb.restore.read_match` fills it directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvdb.damage import read_or_report
from kvdb.match import MatchedBlock
from kvdb.ramtier import PartKey, admit
from kvdb.reader import Bytes, Location

if TYPE_CHECKING:
    from kvdb.store import Store


@dataclass(frozen=True, slots=True)
class Wanted:
    """Some parts of a block, by name."""

    block: MatchedBlock
    parts: Sequence[str]


class ReadBlock(NamedTuple):
    """A block's raw parts with their keys, valid until the next one is asked for and not to be
    changed; None when one is gone or damaged. ``disk`` and ``ram`` bytes were read for it."""

    block: MatchedBlock
    parts: Mapping[str, tuple[PartKey, Bytes]] | None
    disk: int = 0
    ram: int = 0


def stream_blocks(
    store: Store,
    wanted: Sequence[Wanted],
    places: Mapping[tuple[int, str], Location],
    staging: Staging,
) -> Iterator[ReadBlock]:
    """Read ``wanted`` in order, ``store.read_ahead`` blocks ahead of the caller, by way of
    ``staging``. ``places`` are what :meth:`Store.locate` says of them."""

    def read(item: Wanted) -> tuple[ReadBlock, list[Bytes]]:
        parts: dict[str, tuple[PartKey, Bytes]] = {}
        borrowed: list[Bytes] = []
        disk = ram = 0
        for name in item.parts:
            found = read_or_report(
                store.report_damage,
                places.get((item.block.id, name)),
                lambda place: (
                    _read(store, place, staging, borrowed) if item.block.lies_at(place) else None
                ),
            )
            if found is None:
                return ReadBlock(item.block, None), borrowed
            key, raw, from_ram = found
            parts[name] = key, raw
            disk, ram = disk + raw.nbytes * (not from_ram), ram + raw.nbytes * from_ram
        return ReadBlock(item.block, parts, disk, ram), borrowed

    for result, borrowed in store.stream(read, wanted):
        yield result
        staging.take_back(borrowed)


def _read(
    store: Store, place: Location, staging: Staging, borrowed: list[Bytes]
) -> tuple[PartKey, Bytes, bool]:
    """A part's key and raw bytes, and whether these came from the RAM tier. Raises Damaged."""
    key = PartKey.of(place)
    raw = store.ram.get(key)
    if raw is not None:
        return key, raw, True
    if place.codec != "raw":
        raw = store.reader.read(place)
        admit(store.ram, key, raw)
    else:
        raw = staging.lend(place.nbytes)
        borrowed.append(raw)
        store.reader.read_raw(place, raw)
    return key, raw, False


class Staging:
    """Host buffers by size, each lent to one read at a time; ``allocate`` makes one of so many
    bytes. What is kept are the most that were ever lent at once."""

    def __init__(self, allocate: Callable[[int], Bytes] | None = None) -> None:
        self._allocate = allocate or (lambda nbytes: np.empty(nbytes, np.uint8))
        self._free: dict[int, list[Bytes]] = {}
        self._mutex = threading.Lock()

    def lend(self, nbytes: int) -> Bytes:
        with self._mutex:
            free = self._free.get(nbytes)
            if free:
                return free.pop()
        return self._allocate(nbytes)

    def take_back(self, buffers: Sequence[Bytes]) -> None:
        with self._mutex:
            for buffer in buffers:
                self._free.setdefault(buffer.nbytes, []).append(buffer)
