"""Reads parts from shards with preadv, straight into the caller's buffers, checksums verified.

Payloads are never mapped: a truncated mapping kills the process, a short read is only a miss.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvdb.codecs import get_codec
from kvdb.durable import IOV_MAX
from kvdb.errors import IntegrityError, UsageError
from kvdb.identity import Checksum
from kvdb.layout import PartSpec, TensorSpec
from kvdb.shards import shard_path

Bytes = npt.NDArray[np.uint8]
# Per layer, per tensor, an array with the token axis at least as long as what is read into it.
PartBuffers = Sequence[Sequence[npt.NDArray[Any]]]
MAX_OPEN_SHARDS = 64
PIECE_BYTES = 256 << 10


class Location(NamedTuple):
    """Where one part of one block lies."""

    block_id: int
    hash: bytes
    part: str
    shard: str
    offset: int
    nbytes: int
    raw_nbytes: int
    codec: str
    checksum: bytes
    exact: bool = False
    build_id: int | None = None


Reason = Literal["damaged", "missing", "unreadable"]


class Damaged(Exception):
    """Stored bytes are wrong or short (``damaged``), gone (``missing``), or cannot be read now
    (``unreadable``: no descriptor left, no permission, a failing disk), which proves nothing
    against them. Internal: readers turn it into a miss."""

    def __init__(self, detail: str, reason: Reason = "damaged") -> None:
        super().__init__(detail)
        self.reason = reason

    @classmethod
    def by(cls, error: OSError) -> Damaged:
        gone = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
        detail = f"shard cannot be read: {error.strerror}"
        return cls(detail, "missing" if gone else "unreadable")


def empty_bytes(nbytes: int) -> Bytes:
    return np.empty(nbytes, dtype=np.uint8)


class _OpenShard:
    """A descriptor with the parts verified through it; ``signature`` tells whether the file
    changed since."""

    __slots__ = ("fd", "signature", "users", "verified")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.signature = _signature(fd)
        self.verified: set[Location] = set()

    @property
    def size(self) -> int:
        return self.signature[2]


def _signature(fd: int) -> tuple[int, int, int]:
    """What changes when a file does; its link count is looked at apart, since it changes ctime."""
    status = os.fstat(fd)
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size


class _Rows(NamedTuple):
    """One tensor's buffer as bytes: ``outer`` rows of ``capacity`` tokens of ``inner`` bytes.
    ``capacity`` is 0 for a tensor without a token axis."""

    flat: Bytes
    outer: int
    capacity: int
    inner: int


class PartTarget:
    """Where a part's tokens go: the caller's buffers, checked once and cut many times.

    Raises UsageError when a buffer does not fit the layout or is shorter than ``needed`` tokens.
    """

    def __init__(self, spec: PartSpec, buffers: PartBuffers, needed: int) -> None:
        if len(buffers) != len(spec.layers):
            raise UsageError(
                f"Part {spec.name!r} has {len(spec.layers)} layers, not {len(buffers)}."
            )
        if any(len(layer) != len(spec.tensors) for layer in buffers):
            raise UsageError(f"Every layer of part {spec.name!r} has {len(spec.tensors)} tensors.")
        self._rows = [
            _rows(tensor, array, needed)
            for layer in buffers
            for tensor, array in zip(spec.tensors, layer, strict=True)
        ]

    def runs(self, start: int, tokens: int) -> list[memoryview]:
        """Contiguous destination runs of a block, in stored order: layers × tensors × rows."""
        runs: list[memoryview] = []
        for flat, outer, capacity, inner in self._rows:
            if capacity == 0:
                runs.append(flat.data)
                continue
            begin, stride, length = start * inner, capacity * inner, tokens * inner
            view = flat.data
            runs += [view[at : at + length] for at in range(begin, begin + outer * stride, stride)]
        return runs

    def scatter(self, raw: Bytes, start: int, tokens: int, stored_tokens: int) -> None:
        """Copy the first ``tokens`` of ``stored_tokens`` tokens of raw bytes into place. Raises
        Damaged when there are not as many as the layout says."""
        stored = [
            len(flat) if capacity == 0 else outer * stored_tokens * inner
            for flat, outer, capacity, inner in self._rows
        ]
        if sum(stored) != raw.nbytes:
            raise Damaged(f"part has {raw.nbytes} bytes, not what its layout says")
        position = 0
        for (flat, outer, capacity, inner), nbytes in zip(self._rows, stored, strict=True):
            piece = raw[position : position + nbytes]
            position += nbytes
            if capacity == 0:
                np.copyto(flat, piece)
                continue
            rows = flat.reshape(outer, capacity * inner)
            np.copyto(
                rows[:, start * inner : (start + tokens) * inner],
                piece.reshape(outer, stored_tokens * inner)[:, : tokens * inner],
            )


def _rows(tensor: TensorSpec, array: npt.NDArray[Any], needed: int) -> _Rows:
    axis = tensor.token_axis
    full = len(tensor.shape) + (axis is not None)
    capacity = 0 if axis is None or array.ndim != full else array.shape[axis]
    if (
        array.ndim != full
        or not array.flags.writeable
        or array.dtype.itemsize != tensor.numpy_dtype.itemsize
        or not array.flags.c_contiguous
        or array.shape != tensor.full_shape(capacity)
        or (axis is not None and capacity < max(needed, 1))
    ):
        raise UsageError(
            f"Buffer for {tensor.name!r} must be C-contiguous {tensor.dtype} of shape "
            f"{tensor.full_shape(needed)} or longer, not {array.dtype} {array.shape}."
        )
    flat = array.reshape(-1).view(np.uint8)
    if axis is None:
        return _Rows(flat, 1, 0, len(flat))
    outer = math.prod(array.shape[:axis])
    return _Rows(flat, outer, capacity, len(flat) // (outer * capacity))


class ShardReader:
    """Reads parts of published shards. Thread-safe; keeps at most 64 descriptors.

    A part's checksum is verified on its first read in this process, and again if its file changed.
    """

    def __init__(self, root: Path, *, max_open: int = MAX_OPEN_SHARDS) -> None:
        self._root = root
        self._max_open = max_open
        self._open: OrderedDict[str, _OpenShard] = OrderedDict()
        self._verified: dict[str, tuple[tuple[int, int, int], set[Location]]] = {}
        self._mutex = threading.Lock()

    def read_into(
        self, location: Location, target: PartTarget, start: int, tokens: int, stored_tokens: int
    ) -> None:
        """Write the first ``tokens`` tokens of a part to token positions ``start`` … of ``target``.

        ``stored_tokens`` is the block's token count. Raises Damaged; then the buffers hold
        anything at these positions.
        """
        if location.codec == "raw" and tokens == stored_tokens:
            self._read_runs(location, target.runs(start, tokens))
        else:
            target.scatter(self.read(location), start, tokens, stored_tokens)

    def read(self, location: Location) -> Bytes:
        """The raw bytes of a part (1-D uint8). Raises Damaged."""
        stored = self.read_stored(location)
        try:
            return get_codec(location.codec).decode(stored, location.raw_nbytes)
        except (IntegrityError, UsageError, OverflowError, MemoryError) as error:
            raise Damaged(str(error)) from error

    def read_raw(self, location: Location, into: Bytes) -> None:
        """Fill ``into`` with a part that is stored as it is. Raises Damaged."""
        with self._descriptor(location.shard) as shard:
            if location.offset + location.nbytes > shard.size:
                raise Damaged("part reaches beyond its shard")
        self._read_runs(location, [into.data])

    def read_stored(
        self, location: Location, allocate: Callable[[int], Bytes] = empty_bytes
    ) -> Bytes:
        """A part's bytes as they are stored, still encoded, in memory that ``allocate`` gives for
        their number. Raises Damaged."""
        with self._descriptor(location.shard) as shard:
            # The index may lie: never allocate more than the file could fill.
            if location.offset + location.nbytes > shard.size:
                raise Damaged("part reaches beyond its shard")
            stored = allocate(location.nbytes)
        self._read_runs(location, [stored.data])
        return stored

    def read_fresh(self, location: Location) -> None:
        """Check a part's bytes on disk now, whatever was verified before. Raises Damaged."""
        self.forget(location.shard)
        self.read(location)

    def _read_runs(self, location: Location, runs: list[memoryview]) -> None:
        if sum(map(len, runs)) != location.nbytes:
            raise Damaged(f"part has {location.nbytes} bytes, not what its layout says")
        with self._descriptor(location.shard) as shard:
            if location in shard.verified:
                _preadv(shard.fd, location.offset, runs)
                return
            checksum = Checksum(location.hash, location.part)
            offset = location.offset
            for piece in _pieces(runs):
                _preadv(shard.fd, offset, piece)
                for run in piece:
                    offset += len(run)
                    checksum.update(run)
            if checksum.digest() != location.checksum:
                raise Damaged("checksum mismatch")
            shard.verified.add(location)

    @contextmanager
    def _descriptor(self, uuid: str) -> Iterator[_OpenShard]:
        with self._mutex:
            shard = self._open.get(uuid)
            if shard is not None and os.fstat(shard.fd).st_nlink == 0:
                self._drop(uuid)  # unlinked meanwhile: keeping it open would keep its bytes
                shard = None
            if shard is None:
                shard = self._open_shard(uuid)
            else:
                self._open.move_to_end(uuid)
                signature = _signature(shard.fd)
                if signature != shard.signature:
                    shard.signature = signature
                    shard.verified.clear()
            shard.users += 1
        try:
            yield shard
        finally:
            with self._mutex:
                shard.users -= 1
                if shard.users == 0 and self._open.get(uuid) is not shard:
                    os.close(shard.fd)

    def _open_shard(self, uuid: str) -> _OpenShard:
        path = shard_path(self._root, uuid)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise Damaged.by(error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Damaged("shard is not a file", "missing")
        shard = _OpenShard(fd)
        kept = self._verified.pop(uuid, None)
        if kept is not None and kept[0] == shard.signature:
            shard.verified = kept[1]
        self._open[uuid] = shard
        while len(self._open) > self._max_open:
            self._close_oldest()
        return shard

    def _close_oldest(self) -> None:
        uuid, shard = self._open.popitem(last=False)
        self._verified[uuid] = (shard.signature, shard.verified)
        if shard.users == 0:
            os.close(shard.fd)

    def forget(self, uuid: str) -> None:
        """Close a shard's descriptor: its row is gone."""
        with self._mutex:
            self._drop(uuid)

    def sweep(self) -> None:
        """Close descriptors of shards that were unlinked, by this process or another."""
        with self._mutex:
            gone = [u for u, shard in self._open.items() if os.fstat(shard.fd).st_nlink == 0]
            for uuid in gone:
                self._drop(uuid)

    def _drop(self, uuid: str) -> None:
        self._verified.pop(uuid, None)
        shard = self._open.pop(uuid, None)
        if shard is not None and shard.users == 0:
            os.close(shard.fd)

    def close(self) -> None:
        with self._mutex:
            while self._open:
                self._close_oldest()
            self._verified.clear()


def _pieces(runs: list[memoryview]) -> Iterator[list[memoryview]]:
    """Runs in order, some of them at a time and long ones in parts: as much as a processor's cache
    holds, so that what was read is still there when its checksum is made."""
    piece: list[memoryview] = []
    nbytes = 0
    for run in runs:
        for at in range(0, len(run), PIECE_BYTES):
            part = run[at : at + PIECE_BYTES]
            if piece and nbytes + len(part) > PIECE_BYTES:
                yield piece
                piece, nbytes = [], 0
            piece.append(part)
            nbytes += len(part)
    if piece:
        yield piece


def _preadv(fd: int, offset: int, runs: list[memoryview]) -> None:
    """Fill every run from ``offset`` on; short reads are resumed. Raises Damaged at end of file."""
    index = 0
    while index < len(runs):
        batch = runs[index : index + IOV_MAX]
        index += len(batch)
        while batch:
            try:
                count = os.preadv(fd, batch, offset)
            except OSError as error:
                raise Damaged.by(error) from error
            if count == 0 and any(map(len, batch)):
                raise Damaged("shard is shorter than its index says")
            offset += count
            done = 0
            while done < len(batch) and count >= len(batch[done]):
                count -= len(batch[done])
                done += 1
            del batch[:done]
            if batch and count:
                batch[0] = batch[0][count:]
