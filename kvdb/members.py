"""Members: one block as canonical bytes, wherever it travels (snapshots, remotes).

A member is a safetensors file of the block's tokens and parts, as stored. The same content gives
the same bytes, whatever shard it came from; whoever gets one can check all of it against the
namespace and the block's hash.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvdb import index
from kvdb.codecs import CODECS, Codec, get_codec
from kvdb.errors import IntegrityError, KvdbError, UsageError
from kvdb.identity import (
    ROOT_PARENT,
    Checksum,
    Tokens,
    block_hash,
    canonical_json,
    decode_extra,
)
from kvdb.layout import DTYPES
from kvdb.reader import Damaged, Location, empty_bytes
from kvdb.shards import (
    CHECKSUM_BYTES,
    HEADER_CAP_BYTES,
    MALFORMED,
    MAX_DEPTH,
    Bytes,
    NamespaceRecord,
    ShardBlock,
    ShardPart,
    description_checksum,
)

if TYPE_CHECKING:
    from kvdb.store import Store

FORMAT = 1
ALIGNMENT = 64
READ_TRIES = 4
MAX_BUILD = 200
DESCRIBE = (
    "SELECT b.hash, coalesce(f.hash, zeroblob(32)), b.depth, b.token_count, t.tokens, t.extra, "
    "b.exact, u.digest FROM blocks AS b JOIN block_tokens AS t ON t.block_id = b.id "
    "LEFT JOIN blocks AS f ON f.id = b.parent_id LEFT JOIN builds AS u ON u.id = b.build_id "
    "WHERE b.id = ? AND b.state = 'live'"
)


@dataclass(frozen=True, slots=True)
class Member:
    """One block of ``record``'s namespace, with the bytes of its parts as stored.

    ``tokens`` and ``extra`` are None where they were withheld: then the hash cannot be checked.
    ``parent`` is 32 zero bytes at the root; ``build`` is the digest of what computed the block.
    """

    record: NamespaceRecord
    hash: bytes
    parent: bytes
    depth: int
    token_count: int
    tokens: Tokens | None = field(repr=False)
    extra: tuple[bytes, ...] | None
    exact: bool
    build: str | None
    parts: tuple[ShardPart, ...]

    @property
    def payload_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def is_whole(self) -> bool:
        """True when every part is there without which a block is not live."""
        return {part.part for part in self.parts}.issuperset(self.record.layout.required)

    def encode(self) -> list[memoryview]:
        """The member's bytes, as buffers to be written one after another."""
        data = {part.part: part.stored for part in self.parts}
        buffers = [memoryview(_head(self))]
        for tensor in self.tensors:
            own = self.tokens if tensor.name == "tokens" else data[tensor.name]
            if own is None:
                raise UsageError("A part without bytes cannot be encoded.")
            if tensor.nbytes:
                buffers.append(np.ascontiguousarray(own).data.cast("B"))
        return buffers

    @property
    def tensors(self) -> list[_Tensor]:
        """What :meth:`encode` writes behind the header, in order."""
        return _tensors(self.record, self.token_count, self.extra is not None, self.parts)

    def raw(self, part: ShardPart) -> Bytes:
        """A part's bytes as they were put. Raises IntegrityError when they do not decode."""
        assert part.stored is not None  # noqa: S101 - a member holds its bytes
        try:
            return get_codec(part.codec).decode(part.stored, part.raw_nbytes)
        except UsageError as error:
            raise IntegrityError(str(error)) from error

    def recoded(self, codec: Codec) -> Member:
        """The same block with its parts encoded by ``codec``, or raw where that is no larger."""
        return replace(self, parts=tuple(self._recode(part, codec) for part in self.parts))

    def _recode(self, part: ShardPart, codec: Codec) -> ShardPart:
        if part.codec == codec.name or not codec.lossless:
            return part
        raw = self.raw(part)
        stored, name = codec.encode(raw), codec.name
        if stored.nbytes >= raw.nbytes:
            stored, name = raw, "raw"
        return _part(self.hash, part.part, name, stored, raw.nbytes)

    def without_tokens(self) -> Member:
        """The same block without the token ids that its hash follows from."""
        return replace(self, tokens=None, extra=None)

    def block(self, origin: str = "import") -> ShardBlock:
        """The block as a shard describes it."""
        return ShardBlock(
            self.hash,
            self.parent,
            self.depth,
            np.empty(0, "<u4") if self.tokens is None else self.tokens,
            self.extra or (),
            origin,
            self.exact,
            self.build,
            self.parts,
            self.token_count if self.tokens is None else 0,
        )


def _part(hash_: bytes, name: str, codec: str, stored: Bytes, raw_nbytes: int) -> ShardPart:
    checksum = Checksum(hash_, name)
    checksum.update(stored.data)
    return ShardPart(name, codec, stored.nbytes, raw_nbytes, checksum.digest(), stored=stored)


# -- out of a store ------------------------------------------------------------------------------


def read_member(
    store: Store,
    record: NamespaceRecord,
    block_id: int,
    allocate: Callable[[int], Bytes] = empty_bytes,
) -> Member | None:
    """A live block with all parts that can be read, verified; ``record`` is its namespace,
    ``allocate`` gives memory for a part's bytes. None when it is not live (any more): evicted,
    damaged, or its shard cannot be read now."""
    for _ in range(READ_TRIES):
        with store.database.read() as connection:
            row = connection.execute(DESCRIBE, (block_id,)).fetchone()
            places = index.locations(connection, [block_id])
        if row is None:
            return None
        parts: list[ShardPart] = []
        try:
            for (_, name), place in sorted(places.items()):
                parts.append(_read_part(store, name, place, allocate))
        except _Changed:
            continue  # moved by compaction, replaced by an exact twin, or dropped: look again
        hash_, parent, depth, count, tokens, extra, exact, build = row
        member = Member(
            record,
            hash_,
            parent,
            depth,
            count,
            index.tokens_from_blob(tokens) if tokens else None,
            tuple(decode_extra(extra)) if tokens else None,
            bool(exact),
            build,
            tuple(parts),
        )
        return member if member.is_whole else None
    return None


class _Changed(Exception):
    """A part was not where its row said."""


def _read_part(
    store: Store, name: str, place: Location, allocate: Callable[[int], Bytes]
) -> ShardPart:
    try:
        stored = store.reader.read_stored(place, allocate)
    except Damaged as damage:
        store.report_damage(place, damage)
        raise _Changed from damage
    return ShardPart(
        name, place.codec, place.nbytes, place.raw_nbytes, place.checksum, stored=stored
    )


# -- layout of the bytes -------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """One tensor of a member: a part, or the ``tokens``."""

    name: str
    dtype: str
    shape: Sequence[int]
    nbytes: int


def _tensors(
    record: NamespaceRecord, token_count: int, with_tokens: bool, parts: Sequence[ShardPart]
) -> list[_Tensor]:
    """Tensors in order: widest items first, so that each lies aligned without a hole; then by
    name."""
    tensors = [_Tensor("tokens", "U32", (token_count,), 4 * token_count)] if with_tokens else []
    for part in parts:
        spec = record.layout.by_name[part.part]
        stacked = spec.stacked(token_count) if part.codec == "raw" else None
        dtype, shape = stacked if stacked is not None else ("U8", (part.nbytes,))
        tensors.append(_Tensor(part.part, dtype, shape, part.nbytes))
    return sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype].itemsize, tensor.name))


def _head(member: Member) -> bytes:
    """Length field and header, padded so that the data begins aligned."""
    header: dict[str, Any] = {}
    position = 0
    for tensor in member.tensors:
        end = position + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    described = {
        "format": FORMAT,
        "namespace": member.record.fingerprint.hex(),
        "layout": member.record.layout.digest,
        "hash": member.hash.hex(),
        "parent": member.parent.hex(),
        "depth": member.depth,
        "tokens": member.token_count,
        "extra": None if member.extra is None else [key.hex() for key in member.extra],
        "exact": int(member.exact),
        "build": member.build,
        "parts": [
            [part.part, part.codec, part.nbytes, part.raw_nbytes, part.checksum.hex()]
            for part in sorted(member.parts, key=lambda part: part.part)
        ],
    }
    described["checksum"] = description_checksum(described, header)
    header["__metadata__"] = {"kvdb": canonical_json(described)}
    encoded = canonical_json(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)
    return struct.pack("<Q", len(encoded)) + encoded


# -- into a store --------------------------------------------------------------------------------


def parse_member(data: bytes | memoryview | Bytes, record: NamespaceRecord) -> Member:
    """A member of ``record``'s namespace, checked: canonical form, sizes, layout, every checksum,
    and its hash recomputed from its tokens (which may be left out). Parts are views of ``data``.

    Raises IntegrityError, in one sentence, for anything else: the bytes may be hostile.
    """
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    view = view.cast("B")
    try:
        head, described = _read_head(view)
        member = _member(view[len(head) :], described, record)
        canonical = _head(member)
    except MALFORMED as error:
        raise IntegrityError(f"A block's description is wrong ({type(error).__name__}).") from error
    # What is said twice, in another order, or beside the format would not be written again.
    if canonical != head:
        raise IntegrityError("A block's description is not in canonical form.")
    _check_hash(member)
    for part in member.parts:
        _check_part(member, part)
    return member


def _read_head(view: memoryview) -> tuple[bytes, dict[str, Any]]:
    if view.nbytes < 8:
        raise IntegrityError("A block is shorter than its length field.")
    (length,) = struct.unpack("<Q", view[:8])
    if length > HEADER_CAP_BYTES or 8 + length > view.nbytes:
        raise IntegrityError(f"A block declares a header of {length} bytes.")
    header = json.loads(bytes(view[8 : 8 + length]))
    described = json.loads(header["__metadata__"]["kvdb"])
    if described["format"] != FORMAT:
        raise IntegrityError(f"Block format {described['format']!r:.80} is not known.")
    return bytes(view[: 8 + length]), described


def _member(data: memoryview, described: dict[str, Any], record: NamespaceRecord) -> Member:
    if described["namespace"] != record.fingerprint.hex():
        raise IntegrityError("A block belongs to another namespace than its place says.")
    if described["layout"] != record.layout.digest:
        raise IntegrityError("A block has another layout than its namespace.")
    count, depth = described["tokens"], described["depth"]
    build, exact, extra = described["build"], described["exact"], described["extra"]
    parent, hash_ = bytes.fromhex(described["parent"]), bytes.fromhex(described["hash"])
    if (
        type(count) is not int
        or not 0 < count <= record.block_tokens
        or type(depth) is not int
        or not 0 <= depth < MAX_DEPTH
        or type(exact) is not int
        or exact not in (0, 1)
        or len(parent) != len(ROOT_PARENT)
        or len(hash_) != len(ROOT_PARENT)
        or (depth == 0) != (parent == ROOT_PARENT)
        or not (build is None or (str.isascii(build) and len(build) <= MAX_BUILD))
        or (build is None and exact)
    ):
        raise IntegrityError("A block's description has impossible values.")
    parts = [_described_part(record, row, count) for row in described["parts"]]
    if len({part.part for part in parts}) != len(parts) or not parts:
        raise IntegrityError("A block has no parts, or one of them twice.")
    own = _cut(data, _tensors(record, count, extra is not None, parts))
    return Member(
        record,
        hash_,
        parent,
        depth,
        count,
        None if extra is None else np.frombuffer(own["tokens"], dtype="<u4"),
        None if extra is None else tuple(bytes.fromhex(key) for key in extra),
        bool(exact),
        build,
        tuple(
            replace(part, stored=np.frombuffer(own[part.part], dtype=np.uint8)) for part in parts
        ),
    )


def _described_part(record: NamespaceRecord, row: Sequence[Any], tokens: int) -> ShardPart:
    name, codec, nbytes, raw_nbytes, checksum = row
    spec = record.layout.by_name.get(name)
    if spec is None or type(raw_nbytes) is not int or raw_nbytes != spec.nbytes(tokens):
        raise IntegrityError(f"Part {name!r:.80} is not one of the namespace's layout.")
    if codec not in CODECS:
        raise IntegrityError(
            f"Part {name!r:.80} names the codec {codec!r:.80}, which is not known here."
        )
    if type(nbytes) is not int or nbytes < 0 or (codec == "raw" and nbytes != raw_nbytes):
        raise IntegrityError(f"Part {name!r:.80} declares {nbytes!r:.80} bytes.")
    digest = bytes.fromhex(checksum)
    if len(digest) != CHECKSUM_BYTES:
        raise IntegrityError(f"Part {name!r:.80} has a checksum of {len(digest)} bytes.")
    return ShardPart(name, codec, nbytes, raw_nbytes, digest)


def _cut(data: memoryview, tensors: Sequence[_Tensor]) -> dict[str, memoryview]:
    """The bytes of each tensor, which must come to all of ``data``."""
    expected = sum(tensor.nbytes for tensor in tensors)
    if expected != data.nbytes:
        raise IntegrityError(f"A block has {data.nbytes} bytes of tensors instead of {expected}.")
    position = 0
    own: dict[str, memoryview] = {}
    for tensor in tensors:
        own[tensor.name] = data[position : position + tensor.nbytes]
        position += tensor.nbytes
    return own


def _check_hash(member: Member) -> None:
    if member.tokens is None or member.extra is None:
        return
    hash_ = block_hash(member.record.fingerprint, member.parent, member.tokens, member.extra)
    if hash_ != member.hash:
        raise IntegrityError("A block's hash does not follow from its tokens.")


def _check_part(member: Member, part: ShardPart) -> None:
    checksum = Checksum(member.hash, part.part)
    if part.stored is not None:
        checksum.update(part.stored.data)
    if checksum.digest() != part.checksum:
        raise IntegrityError(f"Part {part.part!r} of a block does not match its checksum.")
    if part.codec != "raw":
        try:
            member.raw(part)
        except KvdbError as error:
            raise IntegrityError(f"Part {part.part!r} of a block does not decode.") from error
