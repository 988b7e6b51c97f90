"""Restores on a device without shared host memory: blocks go up as they are stored, one transfer
each, are joined there by one concatenation, and stay there within a budget.

A part of a block is one contiguous piece, layers × tensors × …, and so is its array on the device.
All blocks of a part are joined in one kernel per block; a cache's buffers are then slices of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from engine.cachekinds import MLX_DTYPES, TOKEN_AXIS, Bytes
from engine.cuda import Uplink
from engine.live import LiveState
from engine.plan import Plan
from engine.restore import Buffers
from engine.storage import Read, Storage
from kvdb.layout import Layout, PartSpec
from kvdb.prefetch import Wanted
from kvdb.ramtier import PartKey, RamTier

if TYPE_CHECKING:
    from kvdb.match import Match, MatchedBlock

# MLX's CUDA kernels for it count in 32 bits: a larger concatenation writes into foreign memory.
MOST_ELEMENTS = (1 << 31) - 1
# A part of one block on the device: the arrays of `device_part`.
DevicePart = tuple[mx.array, ...]


class _Piece(NamedTuple):
    """``tokens`` tokens from ``start`` on: the first ones of a part on the device."""

    start: int
    tokens: int
    arrays: DevicePart


class DeviceBuffers(Buffers):
    """What a plan restores, with full attention held on the device. ``tier`` keeps it there for the
    next request; its values never change, and live caches write into copies. ``uplink`` leads
    there."""

    def __init__(self, layout: Layout, tier: RamTier[DevicePart], uplink: Uplink) -> None:
        super().__init__(layout, 0, full=False)
        self._uplink = uplink
        self._tier = tier
        self._parts = [part for part in layout.parts if part.sees_all]
        self._pieces: dict[str, list[_Piece]] = {part.name: [] for part in self._parts}
        self._shared_here = False

    def fetch(self, storage: Storage, steps: Plan, match: Match) -> Read | None:
        work = [(match.blocks[i], match.blocks[i].token_count) for i in steps.reads]
        work = [item for item in work if item[0].index not in self._loaded]
        if steps.shared and match.shared is not None and not self._shared_here:
            work.append((match.shared.block, match.shared.token_count))
        if not work:
            return super().fetch(storage, steps, match)
        read = self._fetch_full(storage, work, match)
        if read.lost or not read.shared_ok:
            return read  # another plan follows, and may need other jumps
        rest = super().fetch(storage, steps, match)
        return read if rest is None else read + rest

    def live(self, caches: Sequence[Any]) -> LiveState:
        live = LiveState(self._layout, caches, self._uplink.download)
        joined = [
            (part, _join(part, self._pieces[part.name]))
            for part in self._parts
            if self._pieces[part.name]
        ]
        mx.eval([arrays for _, arrays in joined])  # not the slices by layer, which cost nothing
        for part, arrays in joined:
            live.fill(_by_layer(part, arrays))
        self._pieces = {}
        return live

    def _fetch_full(
        self, storage: Storage, work: Sequence[tuple[MatchedBlock, int]], match: Match
    ) -> Read:
        """Full attention of the first tokens of some blocks: from the tier, else from the store,
        which reads ahead while this thread moves what came before."""
        counts = {block.id: tokens for block, tokens in work}
        places = storage.locate(list(counts))
        self._tier.begin()
        missing: list[Wanted] = []
        disk = ram = 0
        for block, tokens in work:
            names: list[str] = []
            for part in self._parts:
                place = places.get((block.id, part.name))
                held = None
                if place is not None and place.hash == block.hash:
                    held = self._tier.get(PartKey.of(place))
                if held is None:
                    names.append(part.name)
                else:
                    ram += part.nbytes(block.token_count)
                    self._pieces[part.name].append(_Piece(block.start, tokens, held))
            if names:
                missing.append(Wanted(block, names))
        late = {item.block.id: item for item in missing}
        for got in storage.stream(missing, places, self._uplink.staging):
            if got.parts is None:
                continue
            disk, ram = disk + got.disk, ram + got.ram
            for name, (key, raw) in got.parts.items():
                part = self._layout.by_name[name]
                arrays = device_part(raw, part, got.block.token_count, self._uplink)
                self._tier.put(key, arrays, raw.nbytes)
                self._pieces[name].append(_Piece(got.block.start, counts[got.block.id], arrays))
            del late[got.block.id]
        shared = None if match.shared is None else match.shared.block.id
        self._shared_here = shared in counts and shared not in late
        self._loaded.update(b.index for b, _ in work if b.id != shared and b.id not in late)
        lost = frozenset(
            (item.block.index, name)
            for item in late.values()
            if item.block.id != shared
            for name in item.parts
        )
        return Read(lost, shared not in late, disk, ram)


def device_part(raw: Bytes, part: PartSpec, tokens: int, uplink: Uplink) -> DevicePart:
    """A part of a block on the device: one array ``(layers, tensors, *shape)`` where its tensors
    are alike, else one ``(layers, *shape)`` per tensor. ``raw`` may be overwritten afterwards."""
    layers = len(part.layers)
    alike = part.stacked(tokens)
    if alike is not None:
        dtype, shape = alike
        bits = raw.view(part.tensors[0].numpy_dtype).reshape(shape)
        array = uplink.upload(bits)
        return (array.view(mx.bfloat16) if dtype == "BF16" else array,)
    rows = uplink.upload(raw.reshape(layers, -1))
    arrays, at = [], 0
    for spec in part.tensors:
        nbytes = spec.nbytes(tokens)
        own = mx.contiguous(rows[:, at : at + nbytes]).view(MLX_DTYPES[spec.dtype])
        arrays.append(own.reshape(layers, *spec.full_shape(tokens)))
        at += nbytes
    mx.eval(arrays)
    return tuple(arrays)


def _join(part: PartSpec, pieces: Sequence[_Piece]) -> list[list[mx.array]]:
    """All tokens from 0 on; of those that are not here (holes, to be refilled) the room only. For
    each array of a piece, the layers in as few as MLX can make."""
    alike = part.stacked(1) is not None
    axes = [2 + TOKEN_AXIS] if alike else [1 + TOKEN_AXIS for _ in part.tensors]
    return [
        _joined([(p.start, p.tokens, p.arrays[number]) for p in pieces], axis)
        for number, axis in enumerate(axes)
    ]


def _joined(pieces: Sequence[tuple[int, int, mx.array]], axis: int) -> list[mx.array]:
    row: list[mx.array] = []
    at = 0
    for start, tokens, array in sorted(pieces, key=lambda piece: piece[0]):
        before = (slice(None),) * axis
        if start > at:
            shape = list(array.shape)
            shape[axis] = start - at
            row.append(mx.zeros(shape, dtype=array.dtype))
        skip = max(0, at - start)  # a shared tail may begin inside what is matched
        if skip >= tokens:
            continue
        whole = skip == 0 and tokens == array.shape[axis]
        row.append(array if whole else array[(*before, slice(skip, tokens))])
        at = start + tokens
    layers = row[0].shape[0]
    size = sum(array.size for array in row) // layers
    together = max(1, MOST_ELEMENTS // size)
    return [
        mx.concatenate(
            [array if together >= layers else array[first : first + together] for array in row],
            axis=axis,
        )
        for first in range(0, layers, together)
    ]


def _by_layer(part: PartSpec, joined: Sequence[Sequence[mx.array]]) -> dict[int, list[mx.array]]:
    if part.stacked(1) is not None:
        tensors = range(len(part.tensors))
        layers = [
            [group[layer, tensor] for tensor in tensors]
            for group in joined[0]
            for layer in range(group.shape[0])
        ]
    else:
        columns = [[layer for group in groups for layer in group] for groups in joined]
        layers = [list(arrays) for arrays in zip(*columns, strict=True)]
    return dict(zip(part.layers, layers, strict=True))
