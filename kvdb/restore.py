"""Reads the token-cut parts of a match into final buffers, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdb.errors import UsageError
from kvdb.match import Match, MatchedBlock
from kvdb.reader import Damaged, Location, PartBuffers, PartTarget

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
    if blocks is not None and any(not 0 <= i < len(match.blocks) for i in blocks):
        raise UsageError(f"The match has {len(match.blocks)} blocks; there are no others to read.")
    chosen = [match.blocks[i] for i in (range(len(match.blocks)) if blocks is None else blocks)]
    store.reader.sweep()
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
    nbytes = list(store.spread(lambda item: run.block(*item), work))
    shared_ok = tail is None or nbytes[-1] is not None
    failed = {block.index for (block, _), read in zip(work, nbytes, strict=True) if read is None}
    if tail is not None:
        failed.discard(tail.block.index)
    bad = [
        block.index
        for block in chosen
        if block.index in failed or (blocks is not None and not block.live)
    ]
    return ReadResult(tuple(bad), shared_ok, sum(read or 0 for read in nbytes))


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

    def block(self, block: MatchedBlock, tokens: int) -> int | None:
        """Read a block's first ``tokens`` tokens: the stored bytes that took, or None when a part
        of it is gone or damaged."""
        nbytes = 0
        for name, target in self._targets.items():
            read = self._part(self._place(block, name), target, block, tokens)
            if read is None:
                return None
            nbytes += read
        return nbytes

    def _place(self, block: MatchedBlock, name: str) -> Location | None:
        place = self._places.get((block.id, name))
        return place if place is not None and place.hash == block.hash else None

    def _part(
        self, place: Location | None, target: PartTarget, block: MatchedBlock, tokens: int
    ) -> int | None:
        # A part that moved meanwhile (compaction) is looked up once more.
        for _ in range(2):
            if place is None:
                return None
            try:
                self._store.reader.read_into(place, target, block.start, tokens, block.token_count)
            except Damaged as damage:
                place = self._store.report_damage(place, damage)
            else:
                return place.nbytes
        return None
