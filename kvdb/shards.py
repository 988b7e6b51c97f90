"""Shard files: immutable safetensors files that describe themselves.

A shard holds a run of blocks of one namespace. Its first tensor, ``tokens``, is every block's
token ids; then comes one tensor per part. One metadata key, ``kvdb``, holds canonical JSON with
the namespace and, per block and part, all that the index knows: the index can be rebuilt from it.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvdb.errors import IntegrityError, UsageError
from kvdb.identity import (
    FORMAT_VERSION,
    ROOT_PARENT,
    ModelIdentity,
    Tokens,
    block_hash,
    canonical_json,
    namespace_fingerprint,
)
from kvdb.layout import DTYPES, Layout, PartSpec

MAX_SHARD_BYTES = 64 << 20
MAX_HEADER_BYTES = 512 << 10
# A foreign header is refused above this size before it is parsed. A single block larger than
# MAX_SHARD_BYTES still fits: its header holds one block and its parts.
HEADER_CAP_BYTES = 1 << 20
HEADER_BYTES_PER_BLOCK = 360
HEADER_BYTES_PER_PART = 260
CHECKSUM_BYTES = 16
MAX_DEPTH = 1 << 31
ORIGINS = ("prefill", "decode", "import")
# What a description raises that says something else than was meant.
MALFORMED = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    UsageError,
    OverflowError,
    RecursionError,
)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """A namespace as shards and the index describe it."""

    fingerprint: bytes
    model: str
    identity: ModelIdentity
    layout: Layout
    block_tokens: int
    salt: bytes = b""
    build: str | None = None

    def to_document(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint.hex(),
            "model": self.model,
            "identity": json.loads(self.identity.to_json()),
            "layout": json.loads(self.layout.to_json()),
            "block_tokens": self.block_tokens,
            "salt": self.salt.hex(),
            "build": self.build,
        }

    def abroad(self) -> NamespaceRecord:
        """As other machines are told of it: the folder that a model lies in is none of theirs."""
        if not self.model.startswith(("/", "~", ".")):
            return self
        return replace(self, model=Path(self.model).name)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> NamespaceRecord:
        """Parse and check that the fingerprint follows from the content (IntegrityError)."""
        identity = ModelIdentity.from_json(json.dumps(document["identity"]))
        layout = Layout.from_json(json.dumps(document["layout"]))
        salt = bytes.fromhex(document["salt"])
        fingerprint = namespace_fingerprint(
            identity, layout, document["block_tokens"], salt, document["build"]
        )
        if fingerprint.hex() != document["fingerprint"]:
            raise IntegrityError("A shard's namespace does not match its fingerprint.")
        return cls(
            fingerprint,
            str(document["model"]).encode("utf-8", "replace").decode(),
            identity,
            layout,
            document["block_tokens"],
            salt,
            document["build"],
        )


@dataclass(frozen=True, slots=True)
class ShardPart:
    """One part of one block, as stored: ``stored`` are the codec's output bytes when writing;
    ``offset`` is its place in the file."""

    part: str
    codec: str
    nbytes: int
    raw_nbytes: int
    checksum: bytes
    offset: int = -1
    stored: Bytes | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ShardBlock:
    """One block in a shard. ``parent`` is 32 zero bytes at the root; ``build`` is the digest of
    the build that computed it. Of a block imported without its tokens, ``withheld`` says how many
    they are: its hash is believed."""

    hash: bytes
    parent: bytes
    depth: int
    tokens: Tokens = field(repr=False)
    extra: tuple[bytes, ...]
    origin: str
    exact: bool
    build: str | None
    parts: tuple[ShardPart, ...]
    withheld: int = 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + self.tokens.nbytes

    @property
    def token_count(self) -> int:
        return self.withheld or len(self.tokens)


def shard_path(root: Path, uuid: str) -> Path:
    """``shards/<two hex>/<uuid>.safetensors`` under the store's folder."""
    return root / "shards" / uuid[:2] / f"{uuid}.safetensors"


def temp_path(root: Path, uuid: str) -> Path:
    return root / "tmp" / f"{uuid}.safetensors"


def split_runs(
    blocks: Sequence[ShardBlock], max_bytes: int = MAX_SHARD_BYTES
) -> Iterator[list[ShardBlock]]:
    """Cut blocks into shards of at most ``max_bytes`` or 512 KiB of header; a larger block gets a
    shard of its own."""
    run: list[ShardBlock] = []
    size = header = 0
    for block in blocks:
        cost = HEADER_BYTES_PER_BLOCK + HEADER_BYTES_PER_PART * len(block.parts)
        cost += sum(2 * len(key) for key in block.extra)
        if run and (size + block.nbytes > max_bytes or header + cost > MAX_HEADER_BYTES):
            yield run
            run, size, header = [], 0, 0
        run.append(block)
        size += block.nbytes
        header += cost
    if run:
        yield run


def encode_shard(
    namespace: NamespaceRecord, blocks: Sequence[ShardBlock]
) -> tuple[list[memoryview], list[ShardBlock], int]:
    """Lay out a shard. Returns the buffers to write in order, the blocks with their parts'
    absolute offsets filled in, and the file's size in bytes."""
    header: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    parts: list[list[Any]] = []
    counts = [block.token_count for block in blocks]
    tokens = np.concatenate([block.tokens for block in blocks]).astype("<u4", copy=False)
    position = tokens.nbytes
    header["tokens"] = {"dtype": "U32", "shape": [len(tokens)], "data_offsets": [0, position]}
    buffers = [tokens.data]
    relative: list[list[int]] = []
    for index, block in enumerate(blocks):
        records.append(_block_document(block))
        offsets: list[int] = []
        for part in block.parts:
            if part.stored is None:
                raise UsageError("A part without bytes cannot be written to a shard.")
            spec = namespace.layout.by_name[part.part]
            dtype, shape = _tensor_type(spec, part, counts[index])
            header[f"{index}.{part.part}"] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [position, position + part.nbytes],
            }
            parts.append([index, part.part, part.codec, part.raw_nbytes, part.checksum.hex()])
            offsets.append(position)
            position += part.nbytes
            buffers.append(part.stored.data)
        relative.append(offsets)
    metadata = {
        "format": FORMAT_VERSION,
        "namespace": namespace.to_document(),
        "blocks": records,
        "parts": parts,
    }
    metadata["checksum"] = description_checksum(metadata, header)
    header["__metadata__"] = {"kvdb": canonical_json(metadata)}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    base = 8 + len(encoded)
    placed = [
        _with_offsets(block, [base + offset for offset in offsets])
        for block, offsets in zip(blocks, relative, strict=True)
    ]
    head = memoryview(struct.pack("<Q", len(encoded)) + encoded)
    return [head, *buffers], placed, base + position


def description_checksum(document: dict[str, Any], header: dict[str, Any]) -> str:
    """xxh3-128 (hex) of all that a header says but for this checksum: block hashes do not cover
    names, depths, builds and codecs."""
    said = {key: value for key, value in document.items() if key != "checksum"}
    tensors = {key: value for key, value in header.items() if key != "__metadata__"}
    return xxhash.xxh3_128_hexdigest(canonical_json([said, tensors]).encode())


def _block_document(block: ShardBlock) -> dict[str, Any]:
    return {
        **({"withheld": 1} if block.withheld else {}),
        "hash": block.hash.hex(),
        "parent": block.parent.hex(),
        "depth": block.depth,
        "tokens": block.token_count,
        "extra": [key.hex() for key in block.extra],
        "origin": block.origin,
        "exact": int(block.exact),
        "build": block.build,
    }


def _tensor_type(spec: PartSpec, part: ShardPart, tokens: int) -> tuple[str, tuple[int, ...]]:
    """Raw parts of equal tensors keep their dtype and shape; everything else is bytes."""
    stacked = spec.stacked(tokens) if part.codec == "raw" else None
    return stacked if stacked is not None else ("U8", (part.nbytes,))


def _with_offsets(block: ShardBlock, offsets: Sequence[int]) -> ShardBlock:
    parts = tuple(
        ShardPart(p.part, p.codec, p.nbytes, p.raw_nbytes, p.checksum, offset, p.stored)
        for p, offset in zip(block.parts, offsets, strict=True)
    )
    return replace(block, parts=parts)


@dataclass(frozen=True, slots=True)
class ShardContent:
    """What a shard says of itself, checked against its own structure and its block hashes."""

    namespace: NamespaceRecord
    blocks: tuple[ShardBlock, ...]
    nbytes: int


def read_shard_content(path: Path) -> ShardContent:
    """Parse a shard's header and tokens; payload bytes are not read.

    Raises IntegrityError when the file is not a whole, consistent kvdb shard: wrong sizes,
    overlapping or missing tensors, or a block whose hash does not follow from its tokens.
    Raises OSError when it cannot be read.
    """
    # A pipe or device under a shard's name must not block or be followed.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise IntegrityError("A shard is not a regular file.")
        size = status.st_size
        header = _read_header(file.read(8), size, file.read)
        try:
            document = json.loads(header["__metadata__"]["kvdb"])
            if document["format"] != FORMAT_VERSION:
                raise IntegrityError(f"Shard format {document['format']} is not known.")
            if document["checksum"] != description_checksum(document, header):
                raise IntegrityError("A shard's description is damaged.")
            namespace = NamespaceRecord.from_document(document["namespace"])
            base = file.tell()
            _check_extents(header, size - base)
            start, end = header["tokens"]["data_offsets"]
            file.seek(base + start)
            tokens = np.frombuffer(file.read(end - start), dtype="<u4")
            blocks = tuple(_blocks(document, header, tokens, namespace, base))
        except MALFORMED as error:
            raise IntegrityError(f"A shard's description is wrong: {error!r}.") from error
    return ShardContent(namespace, blocks, size)


def _read_header(prefix: bytes, size: int, read: Any) -> dict[str, Any]:
    if len(prefix) != 8:
        raise IntegrityError("A shard is shorter than its length field.")
    (length,) = struct.unpack("<Q", prefix)
    if length > HEADER_CAP_BYTES or 8 + length > size:
        raise IntegrityError(f"A shard declares a header of {length} bytes.")
    try:
        header = json.loads(read(length))
    except (ValueError, RecursionError) as error:
        raise IntegrityError("A shard's header is not JSON.") from error
    if not isinstance(header, dict):
        raise IntegrityError("A shard's header is not a table of tensors.")
    return header


def _check_extents(header: dict[str, Any], data_bytes: int) -> None:
    """Tensors must tile the data area: no overlap, no hole, no trailing bytes."""
    extents = []
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        start, end = tensor["data_offsets"]
        items = 1
        for dimension in tensor["shape"]:
            if not isinstance(dimension, int) or dimension < 0:
                raise IntegrityError(f"Tensor {name!r} has a bad shape.")
            items *= dimension
        if items * DTYPES[tensor["dtype"]].itemsize != end - start:
            raise IntegrityError(f"Tensor {name!r} has a shape that does not fit its bytes.")
        extents.append((start, end))
    position = 0
    for start, end in sorted(extents):
        if start != position or end < start:
            raise IntegrityError("A shard's tensors overlap or leave holes.")
        position = end
    if position != data_bytes:
        raise IntegrityError(f"A shard has {data_bytes} bytes of tensors instead of {position}.")


def _blocks(
    document: dict[str, Any],
    header: dict[str, Any],
    tokens: Tokens,
    namespace: NamespaceRecord,
    base: int,
) -> Iterator[ShardBlock]:
    parts: dict[int, list[ShardPart]] = {}
    for index, name, codec, raw_nbytes, checksum in document["parts"]:
        start, end = header[f"{index}.{name}"]["data_offsets"]
        spec = namespace.layout.by_name[name]
        if raw_nbytes != spec.nbytes(document["blocks"][index]["tokens"]):
            raise IntegrityError(f"Part {name!r} declares {raw_nbytes} bytes, not its layout's.")
        checksum = bytes.fromhex(checksum)
        if not str(codec).isascii():
            raise IntegrityError(f"Part {name!r} names a codec that there cannot be.")
        if len(checksum) != CHECKSUM_BYTES:
            raise IntegrityError(f"Part {name!r} has a checksum of {len(checksum)} bytes.")
        parts.setdefault(index, []).append(
            ShardPart(str(name), str(codec), end - start, raw_nbytes, checksum, base + start)
        )
    position = 0
    for index, record in enumerate(document["blocks"]):
        count = record["tokens"]
        withheld = count if record.get("withheld") else 0
        own = tokens[position : position + count - withheld]
        position += count - withheld
        extra = tuple(bytes.fromhex(key) for key in record["extra"])
        parent = bytes.fromhex(record["parent"])
        hash_ = block_hash(namespace.fingerprint, parent, own, extra)
        if withheld and record["origin"] == "import":
            hash_ = bytes.fromhex(record["hash"])
        fits = len(own) + withheld == count and 0 < count <= namespace.block_tokens
        if not fits or hash_.hex() != record["hash"] or len(hash_) != len(ROOT_PARENT):
            raise IntegrityError("A block's hash does not follow from its tokens.")
        if (
            record["origin"] not in ORIGINS
            or not 0 <= record["depth"] < MAX_DEPTH
            or not (record["build"] is None or str.isascii(record["build"]))
            or (record["depth"] == 0) != (parent == ROOT_PARENT)
        ):
            raise IntegrityError("A block's description has impossible values.")
        yield ShardBlock(
            hash_,
            parent,
            int(record["depth"]),
            own,
            extra,
            str(record["origin"]),
            bool(record["exact"]),
            record["build"],
            tuple(parts.get(index, ())),
            withheld,
        )
