"""A block as the objects of a remote: one of its required parts, one of each other part.

So the keys that exist say exactly which parts can be had, and only what is needed is fetched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvdb.errors import IntegrityError
from kvdb.layout import Layout
from kvdb.members import Member, parse_member
from kvdb.remotes.naming import BlockKey, key_of, parse_block_key
from kvdb.shards import Bytes, NamespaceRecord

# Of an object's header: what every one has, what a part adds, and what keys beside tokens may.
HEADER_BYTES = 4096
HEADER_BYTES_PER_PART = 512
EXTRA_BYTES = 4096


def split(member: Member) -> list[Member]:
    """A whole block as members of one object each, that of the required parts first."""
    required = set(member.record.layout.required)
    body = tuple(part for part in member.parts if part.part in required)
    rest = [part for part in member.parts if part.part not in required]
    return [replace(member, parts=parts) for parts in (body, *((part,) for part in rest))]


def pack(member: Member) -> list[tuple[BlockKey, list[memoryview]]]:
    """The objects of a whole block. A block without tokens has none: nobody could check them."""
    if member.tokens is None:
        return []
    return [(key_of(each), each.encode()) for each in split(member)]


def unpack(key: str, data: bytes | memoryview | Bytes, record: NamespaceRecord) -> Member:
    """The member under a key of ``record``'s namespace, wholly checked (see parse_member); its
    parts are views of ``data``. Raises IntegrityError, in one sentence, for anything else."""
    asked = parse_block_key(key)
    member = parse_member(data, record)
    if member.tokens is None:
        raise IntegrityError("An object of a remote has no tokens.")
    names = {part.part for part in member.parts}
    wanted = set(record.layout.required) if asked is None or asked.part is None else {asked.part}
    if asked is None or key_of(member) != asked or names != wanted:
        raise IntegrityError("An object of a remote is not what its key says.")
    return member


def keys_of(
    hash_: bytes, depth: int, names: Iterable[str], record: NamespaceRecord
) -> list[BlockKey]:
    """Keys of the objects that hold these parts of a block."""
    required = set(record.layout.required)
    rest = [name for name in names if name not in required]
    return [BlockKey(record.fingerprint, depth, hash_, part) for part in (None, *rest)]


def most_bytes(layout: Layout, part: str | None, tokens: int) -> int:
    """The most that an object may have: room for what is fetched."""
    parts = [
        spec for spec in layout.parts if (spec.required if part is None else spec.name == part)
    ]
    payload = sum(spec.nbytes(tokens) for spec in parts)
    return payload + 4 * tokens + HEADER_BYTES + HEADER_BYTES_PER_PART * len(parts) + EXTRA_BYTES
