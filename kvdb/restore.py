"""Reads the token-cut parts of a match into final buffers, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdb.errors import UsageError
from kvdb.layout import PartSpec
from kvdb.match import Match, MatchedBlock
from kvdb.reader import Damaged, Location, PartBuffers

if TYPE_CHECKING:
    from kvdb.store import Store


@dataclass(frozen=True, slots=True)
class ReadResult:
    """``bad`` are indices of blocks that could not be read: holes from now on, and their buffers
    hold anything. ``shared_ok`` is False when the shared tail could not be read. ``nbytes`` were
    read."""

    bad: tuple[int, ...]
    shared_ok: bool
    nbytes: int


def read_match(
    store: Store,
    match: Match,
    into: Mapping[str, PartBuffers],
    blocks: Sequence[int] | None,
    shared: bool,
) -> ReadResult:
    """See :meth:`kvdb.store.Store.read`."""
    specs = [match.namespace.layout.by_name.get(name) for name in into]
    if any(spec is None or not spec.cuttable for spec in specs):
        raise UsageError(f"Only parts that are cut along tokens can be read into: {list(into)}.")
    chosen = [match.blocks[i] for i in (range(len(match.blocks)) if blocks is None else blocks)]
    wanted = [block.id for block in chosen if block.live]
    if shared and match.shared is not None:
        wanted.append(match.shared.block.id)
    places = store.locate(wanted)
    bad: list[int] = []
    nbytes = 0
    for block in chosen:
        if not block.live:
            if blocks is not None:
                bad.append(block.index)
            continue
        read = _read_block(store, match, into, places, block, block.token_count)
        if read is None:
            bad.append(block.index)
        else:
            nbytes += read
    shared_ok = True
    if shared and match.shared is not None:
        tail, count = match.shared
        read = _read_block(store, match, into, places, tail, count)
        shared_ok = read is not None
        nbytes += read or 0
    return ReadResult(tuple(bad), shared_ok, nbytes)


def _read_block(
    store: Store,
    match: Match,
    into: Mapping[str, PartBuffers],
    places: Mapping[tuple[int, str], Location],
    block: MatchedBlock,
    tokens: int,
) -> int | None:
    """Bytes read, or None when a part of the block is gone or damaged."""
    nbytes = 0
    for name, buffers in into.items():
        spec = match.namespace.layout.by_name[name]
        location = places.get((block.id, name))
        if location is None or not _read_part(store, location, spec, buffers, block, tokens):
            return None
        nbytes += location.nbytes
    return nbytes


def _read_part(
    store: Store,
    location: Location,
    spec: PartSpec,
    buffers: PartBuffers,
    block: MatchedBlock,
    tokens: int,
) -> bool:
    """Read one part; one that moved meanwhile (compaction) is looked up once more."""
    place: Location | None = location
    for _ in range(2):
        if place is None:
            return False
        try:
            store.reader.read_into(place, spec, buffers, block.start, tokens, block.token_count)
            return True
        except Damaged as damage:
            place = store.report_damage(place, str(damage))
    return False
