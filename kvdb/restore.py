"""Reads the token-cut parts of a match into final buffers, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvdb.damage import read_or_report
from kvdb.errors import UsageError
from kvdb.match import Match, MatchedBlock
from kvdb.ramtier import PartKey, admit
from kvdb.reader import Bytes, Location, PartBuffers, PartTarget

if TYPE_CHECKING:
    from kvdb.store import Store


@dataclass(frozen=True, slots=True)
class ReadResult:
    """``bad`` are indices of blocks that could not be read: holes from now on, and their buffers
    hold anything. ``shared_ok`` is False when the shared tail could not be read. ``nbytes`` were
    read from shards and ``ram_nbytes`` came from the RAM tier."""

    bad: tuple[int, ...]
    shared_ok: bool
    nbytes: int
    ram_nbytes: int = 0


class _Count(NamedTuple):
    """Bytes read from shards, and bytes from the RAM tier."""

    disk: int
    ram: int


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
    if blocks is not None and any(not 0 <= i < len(match.blocks) for i in blocks):
        raise UsageError(f"The match has {len(match.blocks)} blocks; there are no others to read.")
    chosen = [match.blocks[i] for i in (range(len(match.blocks)) if blocks is None else blocks)]
    store.reader.sweep()
    store.ram.begin()
    wanted = [block.id for block in chosen if block.live]
    tail = match.shared if shared else None
    end = max((block.end for block in chosen), default=0)
    if tail is not None:
        wanted.append(tail.block.id)
        end = max(end, tail.block.start + tail.token_count)
    run = _Read(
        store,
        {spec.name: PartTarget(spec, into[spec.name], end) for spec in specs if spec is not None},
        store.locate(wanted),
    )
    work = [(block, block.token_count) for block in chosen if block.live]
    if tail is not None:
        work.append((tail.block, tail.token_count))
    # Reading and verifying leave the interpreter's lock, so blocks overlap on several cores.
    counts = list(store.spread(lambda item: run.block(*item), work))
    shared_ok = tail is None or counts[-1] is not None
    failed = {block.index for (block, _), count in zip(work, counts, strict=True) if count is None}
    if tail is not None:
        failed.discard(tail.block.index)
    bad = [
        block.index
        for block in chosen
        if block.index in failed or (blocks is not None and not block.live)
    ]
    read = [count for count in counts if count is not None]
    return ReadResult(
        tuple(bad), shared_ok, sum(count.disk for count in read), sum(count.ram for count in read)
    )


class _Read:
    """One pass over blocks into fixed targets. Blocks may be read from several threads."""

    def __init__(
        self,
        store: Store,
        targets: Mapping[str, PartTarget],
        places: Mapping[tuple[int, str], Location],
    ) -> None:
        self._store = store
        self._targets = targets
        self._places = places

    def block(self, block: MatchedBlock, tokens: int) -> _Count | None:
        """Read a block's first ``tokens`` tokens: the bytes that took, or None when a part of it
        is gone or damaged."""
        disk = ram = 0
        for name, target in self._targets.items():
            count = self._part(self._place(block, name), target, block, tokens)
            if count is None:
                return None
            disk, ram = disk + count.disk, ram + count.ram
        return _Count(disk, ram)

    def _place(self, block: MatchedBlock, name: str) -> Location | None:
        place = self._places.get((block.id, name))
        return place if place is not None and place.hash == block.hash else None

    def _part(
        self, place: Location | None, target: PartTarget, block: MatchedBlock, tokens: int
    ) -> _Count | None:
        return read_or_report(
            self._store.report_damage,
            place,
            lambda place: self._fill(place, target, block, tokens),
        )

    def _fill(
        self, place: Location, target: PartTarget, block: MatchedBlock, tokens: int
    ) -> _Count:
        """From the RAM tier; else by way of it where it wants the part, else straight from disk."""
        ram, key = self._store.ram, PartKey.of(place)
        raw = ram.get(key)
        if raw is not None:
            target.scatter(raw, block.start, tokens, block.token_count)
            return _Count(0, raw.nbytes)
        if ram.wants(key, place.raw_nbytes):
            raw = self._store.reader.read(place)
            target.scatter(raw, block.start, tokens, block.token_count)
            admit(ram, key, raw)
        else:
            self._store.reader.read_into(place, target, block.start, tokens, block.token_count)
        return _Count(place.nbytes, 0)


def read_cached(store: Store, place: Location) -> Bytes:
    """A part's raw bytes from the RAM tier or from disk, not to be changed. Raises Damaged."""
    key = PartKey.of(place)
    raw = store.ram.get(key)
    if raw is None:
        raw = store.reader.read(place)
        admit(store.ram, key, raw)
    return raw


def preload_match(store: Store, match: Match) -> ReadResult:
    """See :meth:`kvdb.store.Store.preload`."""
    blocks = [block for block in match.blocks if block.live]
    store.ram.begin()
    places = store.locate([block.id for block in blocks])

    def part(place: Location) -> _Count:
        held = PartKey.of(place) in store.ram
        nbytes = read_cached(store, place).nbytes
        return _Count(0, nbytes) if held else _Count(place.nbytes, 0)

    def load(block: MatchedBlock) -> _Count | None:
        disk = ram = 0
        for name in block.parts:
            count = read_or_report(store.report_damage, places.get((block.id, name)), part)
            if count is None:
                return None
            disk, ram = disk + count.disk, ram + count.ram
        return _Count(disk, ram)

    counts = list(store.spread(load, blocks))
    bad = tuple(b.index for b, count in zip(blocks, counts, strict=True) if count is None)
    read = [count for count in counts if count is not None]
    return ReadResult(bad, True, sum(c.disk for c in read), sum(c.ram for c in read))
