"""Reads the parts of a match into final buffers, block by block."""

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
class Want:
    """One part of some matched ``blocks`` (their indices), and where it goes: token ``start`` of
    the prompt is the first of ``buffers``, arrays ``[layer][tensor]``. ``shared_tokens`` of the
    shared tail come too. A part without a token axis is that of a single block."""

    part: str
    buffers: PartBuffers
    blocks: tuple[int, ...]
    start: int = 0
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReadResult:
    """``bad`` are indices of blocks that could not be read: their buffers hold anything. ``lost``
    names the parts of them that are gone now. ``shared_ok`` is False when the shared tail could
    not be read. ``nbytes`` were read."""

    bad: tuple[int, ...]
    lost: frozenset[tuple[int, str]]
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
    _check_indices(match, () if blocks is None else blocks)
    chosen = [match.blocks[i] for i in (range(len(match.blocks)) if blocks is None else blocks)]
    live = tuple(block.index for block in chosen if block.live)
    tail = match.shared.token_count if shared and match.shared is not None else 0
    wants = [Want(name, buffers, live, 0, tail) for name, buffers in into.items()]
    result = read_wants(store, match, wants)
    dead = () if blocks is None else tuple(b.index for b in chosen if not b.live)
    bad = tuple(sorted({*result.bad, *dead}))
    return ReadResult(bad, result.lost, result.shared_ok, result.nbytes)


def read_wants(store: Store, match: Match, wants: Sequence[Want]) -> ReadResult:
    """See :meth:`kvdb.store.Store.read_parts`."""
    for want in wants:
        if want.part not in match.namespace.layout.by_name:
            raise UsageError(f"The layout has no part {want.part!r}.")
        _check_indices(match, want.blocks)
    store.reader.sweep()
    work = [item for want in wants for item in _items(match, want)]
    places = store.locate(sorted({item.block.id for item in work}))
    # Reading and verifying leave the interpreter's lock, so blocks overlap on several cores.
    nbytes = list(store.spread(lambda item: _read(store, places, item), work))
    failed = [item for item, read in zip(work, nbytes, strict=True) if read is None]
    lost = frozenset((item.block.index, item.part) for item in failed if not item.shared)
    return ReadResult(
        tuple(sorted({index for index, _ in lost})),
        lost,
        not any(item.shared for item in failed),
        sum(read or 0 for read in nbytes),
    )


@dataclass(frozen=True, slots=True)
class _Item:
    """The first ``tokens`` tokens of a block's part, to land at token ``position`` of a target."""

    part: str
    target: PartTarget
    block: MatchedBlock
    position: int
    tokens: int
    shared: bool


def _check_indices(match: Match, blocks: Sequence[int]) -> None:
    if any(not 0 <= index < len(match.blocks) for index in blocks):
        raise UsageError(f"The match has {len(match.blocks)} blocks; there are no others to read.")


def _items(match: Match, want: Want) -> list[_Item]:
    chosen = [(match.blocks[i], match.blocks[i].token_count, False) for i in want.blocks]
    if want.shared_tokens:
        if match.shared is None:
            raise UsageError("The match has no shared tail to read.")
        chosen.append((match.shared.block, want.shared_tokens, True))
    if any(block.start < want.start for block, *_ in chosen):
        raise UsageError(f"Blocks of part {want.part!r} begin before the buffers do.")
    end = max((block.start + tokens for block, tokens, _ in chosen), default=want.start)
    spec = match.namespace.layout.by_name[want.part]
    target = PartTarget(spec, want.buffers, end - want.start)
    return [
        _Item(want.part, target, block, block.start - want.start, tokens, shared)
        for block, tokens, shared in chosen
    ]


def _read(store: Store, places: Mapping[tuple[int, str], Location], item: _Item) -> int | None:
    """The stored bytes that reading took, or None when the part is gone or damaged."""
    block = item.block
    place = places.get((block.id, item.part))
    if place is not None and place.hash != block.hash:
        return None
    # A part that moved meanwhile (compaction) is looked up once more.
    for _ in range(2):
        if place is None:
            return None
        try:
            store.reader.read_into(
                place, item.target, item.position, item.tokens, block.token_count
            )
        except Damaged as damage:
            place = store.report_damage(place, damage)
        else:
            return place.nbytes
    return None
