"""Reads the parts of a match into final buffers, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvdb.damage import read_or_report
from kvdb.errors import UsageError
from kvdb.match import Match, MatchedBlock
from kvdb.ramtier import PartKey, admit
from kvdb.reader import Bytes, Location, PartBuffers, PartTarget

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
    not be read. ``nbytes`` were read from shards, ``ram_nbytes`` came from the RAM tier."""

    bad: tuple[int, ...]
    lost: frozenset[tuple[int, str]]
    shared_ok: bool
    nbytes: int
    ram_nbytes: int = 0


class Fetch(Protocol):
    """Gets parts that remotes have into place."""

    def __call__(self, items: Sequence[Item]) -> Sequence[Item]:
        """Returns those that it could not get: their buffers hold anything."""


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
    _check_indices(match, () if blocks is None else blocks)
    chosen = [match.blocks[i] for i in (range(len(match.blocks)) if blocks is None else blocks)]
    live = tuple(block.index for block in chosen if block.live)
    tail = match.shared.token_count if shared and match.shared is not None else 0
    wants = [Want(name, buffers, live, 0, tail) for name, buffers in into.items()]
    result = read_wants(store, match, wants)
    dead = () if blocks is None else tuple(b.index for b in chosen if not b.live)
    bad = tuple(sorted({*result.bad, *dead}))
    return replace(result, bad=bad)


def read_wants(
    store: Store, match: Match, wants: Sequence[Want], fetch: Fetch | None = None
) -> ReadResult:
    """See :meth:`kvdb.store.Store.read_parts`."""
    for want in wants:
        if want.part not in match.namespace.layout.by_name:
            raise UsageError(f"The layout has no part {want.part!r}.")
        _check_indices(match, want.blocks)
    store.reader.sweep()
    store.ram.begin()
    items = [item for want in wants for item in _items(match, want)]
    remote = [item for item in items if item.is_remote] if match.elsewhere else []
    work = [item for item in items if not item.is_remote] if remote else items
    places = store.locate(sorted({item.block.id for item in work}))
    # Reading and verifying leave the interpreter's lock, so blocks overlap on several cores.
    counts = list(store.spread(lambda item: _read(store, places, item), work))
    failed = [item for item, count in zip(work, counts, strict=True) if count is None]
    if remote:
        failed += remote if fetch is None else fetch(remote)
    return _result(
        counts,
        ((item.block.index, item.part) for item in failed if not item.shared),
        shared_ok=not any(item.shared for item in failed),
    )


@dataclass(frozen=True, slots=True)
class Item:
    """The first ``tokens`` tokens of a block's part, to land at token ``position`` of a target."""

    part: str
    target: PartTarget
    block: MatchedBlock
    position: int
    tokens: int
    shared: bool

    @property
    def is_remote(self) -> bool:
        reference = self.block.parts.get(self.part)
        return reference is not None and reference.is_remote


def _check_indices(match: Match, blocks: Sequence[int]) -> None:
    if any(not 0 <= index < len(match.blocks) for index in blocks):
        raise UsageError(f"The match has {len(match.blocks)} blocks; there are no others to read.")


def _items(match: Match, want: Want) -> list[Item]:
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
        Item(want.part, target, block, block.start - want.start, tokens, shared)
        for block, tokens, shared in chosen
    ]


def _read(store: Store, places: Mapping[tuple[int, str], Location], item: Item) -> _Count | None:
    """The bytes that reading took, or None when the part is gone or damaged."""
    place = places.get((item.block.id, item.part))
    return read_or_report(store.report_damage, place, lambda place: _fill(store, place, item))


def _fill(store: Store, place: Location, item: Item) -> _Count | None:
    """From the RAM tier; else by way of it where it wants the part, else straight from disk."""
    if not item.block.lies_at(place):
        return None
    stored_tokens = item.block.token_count
    ram, key = store.ram, PartKey.of(place)
    raw = ram.get(key)
    if raw is not None:
        item.target.scatter(raw, item.position, item.tokens, stored_tokens)
        return _Count(0, raw.nbytes)
    if ram.wants(key, place.raw_nbytes):
        raw = store.reader.read(place)
        item.target.scatter(raw, item.position, item.tokens, stored_tokens)
        admit(ram, key, raw)
    else:
        store.reader.read_into(place, item.target, item.position, item.tokens, stored_tokens)
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
    store.ram.begin()
    parts = [(block, name) for block in match.blocks if block.live for name in block.parts]
    places = store.locate(sorted({block.id for block, _ in parts}))

    def load(place: Location) -> _Count:
        held = PartKey.of(place) in store.ram
        nbytes = read_cached(store, place).nbytes
        return _Count(0, nbytes) if held else _Count(place.nbytes, 0)

    def load_part(item: tuple[MatchedBlock, str]) -> _Count | None:
        place = places.get((item[0].id, item[1]))
        return read_or_report(store.report_damage, place, load)

    counts = list(store.spread(load_part, parts))
    failed = [item for item, count in zip(parts, counts, strict=True) if count is None]
    return _result(counts, ((block.index, name) for block, name in failed), shared_ok=True)


def _result(
    counts: Sequence[_Count | None], lost: Iterable[tuple[int, str]], *, shared_ok: bool
) -> ReadResult:
    gone = frozenset(lost)
    read = [count for count in counts if count is not None]
    return ReadResult(
        tuple(sorted({index for index, _ in gone})),
        gone,
        shared_ok,
        sum(count.disk for count in read),
        sum(count.ram for count in read),
    )
