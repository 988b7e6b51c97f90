"""Identity: digests of a model's content, namespace fingerprints, block hashes.

A block hash covers its parent's hash, so equal hashes mean equal prefixes in one namespace.
SHA-256 is identity; xxh3-128 is only a checksum of stored bytes, and the two are never swapped.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from kvdb.errors import UsageError
from kvdb.layout import Layout

FORMAT_VERSION = 1
BLOCK_DOMAIN = b"kvdb/block/1\0"
ROOT_PARENT = bytes(32)
MIN_BLOCK_TOKENS = 16
MAX_BLOCK_TOKENS = 4096
DEFAULT_BLOCK_TOKENS = 256

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A model by content: no path and no name takes part in the fingerprint.

    weights, config, template-free code digests are hex SHA-256 of file contents; ``adapters`` are
    digests of each adapter's content and config, in order; ``overrides`` are config overrides.
    """

    weights: str
    config: str
    overrides: Mapping[str, str] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    code: str | None = None

    def to_json(self) -> str:
        return canonical_json(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelIdentity:
        document = json.loads(text)
        return cls(
            document["weights"],
            document["config"],
            document["overrides"],
            tuple(document["adapters"]),
            document["code"],
        )


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Something besides tokens that a block's state depends on (an image digest, say), placed in
    the block that holds token ``position``."""

    position: int
    key: bytes


def canonical_json(document: object) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def check_block_tokens(block_tokens: int) -> int:
    """Return ``block_tokens`` or raise UsageError: it must be a power of two, 16 to 4096."""
    if not MIN_BLOCK_TOKENS <= block_tokens <= MAX_BLOCK_TOKENS or block_tokens & (
        block_tokens - 1
    ):
        raise UsageError(
            f"block_tokens must be a power of two from {MIN_BLOCK_TOKENS} to {MAX_BLOCK_TOKENS}, "
            f"not {block_tokens}."
        )
    return block_tokens


def namespace_fingerprint(
    identity: ModelIdentity,
    layout: Layout,
    block_tokens: int,
    salt: bytes = b"",
    build: str | None = None,
) -> bytes:
    """SHA-256 (32 bytes) of the canonical JSON of everything that state depends on besides tokens.

    ``build`` is the digest of code and hardware, given only where they were measured to compute
    another state than the namespace holds.
    """
    document = {
        "format": FORMAT_VERSION,
        "identity": json.loads(identity.to_json()),
        "layout": json.loads(layout.to_json()),
        "block_tokens": check_block_tokens(block_tokens),
        "salt": salt.hex(),
        "build": build,
    }
    return hashlib.sha256(canonical_json(document).encode()).digest()


def as_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """Token ids as a contiguous little-endian uint32 array. Raises UsageError outside 0…2³²−1."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, dtype="<u4")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError("Tokens must be a flat sequence of integers.")
    if (array.dtype.kind == "i" and int(array.min()) < 0) or int(array.max()) > 0xFFFFFFFF:
        raise UsageError("Token ids must lie between 0 and 4294967295.")
    return np.ascontiguousarray(array, dtype="<u4")


def block_hash(
    namespace: bytes, parent: bytes, tokens: Tokens, extra: Sequence[bytes] = ()
) -> bytes:
    """The 32-byte hash of one block; ``parent`` is ROOT_PARENT for the first."""
    digest = hashlib.sha256(BLOCK_DOMAIN + namespace + parent + struct.pack("<I", len(tokens)))
    digest.update(tokens.data if len(tokens) else b"")
    digest.update(encode_extra(extra))
    return digest.digest()


def chain_hashes(
    namespace: bytes,
    tokens: Tokens,
    block_tokens: int,
    extra_keys: Sequence[ExtraKey] = (),
) -> list[bytes]:
    """Hashes of all blocks of ``tokens``, root first; the last block may be shorter."""
    hashes: list[bytes] = []
    parent = ROOT_PARENT
    extras = extra_by_block(extra_keys, block_tokens) if extra_keys else {}
    data = tokens.data.cast("B") if len(tokens) else memoryview(b"")
    sha256 = hashlib.sha256
    prefix = BLOCK_DOMAIN + namespace
    full = struct.pack("<I", block_tokens)
    none = struct.pack("<I", 0)
    step = block_tokens * 4
    # One call per block on the hot path: 128 K tokens are 512 blocks.
    for index, start in enumerate(range(0, len(data), step)):
        body = data[start : start + step]
        count = full if len(body) == step else struct.pack("<I", len(body) // 4)
        extra = encode_extra(extras[index]) if index in extras else none
        parent = sha256(b"".join((prefix, parent, count, body, extra))).digest()
        hashes.append(parent)
    return hashes


def extra_by_block(extra_keys: Sequence[ExtraKey], block_tokens: int) -> dict[int, list[bytes]]:
    """Extra keys by block index, in order of position."""
    if any(extra.position < 0 for extra in extra_keys):
        raise UsageError("An extra key's position must be that of a token.")
    grouped: dict[int, list[bytes]] = {}
    for extra in sorted(extra_keys, key=lambda e: e.position):
        grouped.setdefault(extra.position // block_tokens, []).append(extra.key)
    return grouped


def encode_extra(extra: Sequence[bytes]) -> bytes:
    """u32 count, then each key as u32 length and its bytes."""
    return b"".join(
        [struct.pack("<I", len(extra)), *(struct.pack("<I", len(key)) + key for key in extra)]
    )


def decode_extra(data: bytes) -> list[bytes]:
    """Invert :func:`encode_extra`. Raises UsageError on other bytes."""
    try:
        (count,) = struct.unpack_from("<I", data)
        offset = 4
        keys: list[bytes] = []
        for _ in range(count):
            (length,) = struct.unpack_from("<I", data, offset)
            keys.append(data[offset + 4 : offset + 4 + length])
            offset += 4 + length
    except struct.error as error:
        raise UsageError("Extra keys are cut short.") from error
    if offset != len(data):
        raise UsageError("Extra keys have the wrong length.")
    return keys


class Checksum:
    """xxh3-128 over (block hash ‖ part name ‖ stored bytes): bytes under a wrong row fail too."""

    def __init__(self, hash_: bytes, part: str) -> None:
        self._digest = xxhash.xxh3_128(hash_ + part.encode())

    def update(self, data: memoryview | bytes) -> None:
        self._digest.update(data)

    def digest(self) -> bytes:
        return self._digest.digest()
