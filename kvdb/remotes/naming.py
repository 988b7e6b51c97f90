"""Keys of objects: ``v1/NAMESPACE/DEPTH-HASH`` for the required parts of a block,
``v1/NAMESPACE/DEPTH-HASH.PART`` for each other part, and ``v1/NAMESPACE/namespace.json``.

Objects of blocks are members (kvdb/members.py). A prompt gives the namespace, depth and hash of all
its blocks, so what a remote has of it is asked by key, and in the order of keys parents come first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from kvdb.layout import Layout
from kvdb.members import Member

ROOT = "v1/"
NAMESPACE_FILE = "namespace.json"
BLOCK_KEY = re.compile(r"v1/([0-9a-f]{64})/([0-9a-f]{6})-([0-9a-f]{64})(?:\.([a-z]+(?:_[0-9]+)?))?")
NAMESPACE_KEY = re.compile(r"v1/([0-9a-f]{64})/namespace\.json")


class BlockKey(NamedTuple):
    """What a key says. ``part`` is None for the required parts."""

    fingerprint: bytes
    depth: int
    hash: bytes
    part: str | None

    def __str__(self) -> str:
        part = "" if self.part is None else "." + self.part.replace(":", "_")
        return f"{prefix(self.fingerprint)}{self.depth:06x}-{self.hash.hex()}{part}"


def prefix(fingerprint: bytes) -> str:
    """What the keys of a namespace begin with."""
    return f"{ROOT}{fingerprint.hex()}/"


def namespace_key(fingerprint: bytes) -> str:
    return prefix(fingerprint) + NAMESPACE_FILE


def parse_block_key(key: str) -> BlockKey | None:
    """None for a key that this program does not give: others' objects are none of ours."""
    found = BLOCK_KEY.fullmatch(key)
    if found is None:
        return None
    part = None if found[4] is None else found[4].replace("_", ":")
    return BlockKey(bytes.fromhex(found[1]), int(found[2], 16), bytes.fromhex(found[3]), part)


def parse_namespace_key(key: str) -> bytes | None:
    found = NAMESPACE_KEY.fullmatch(key)
    return None if found is None else bytes.fromhex(found[1])


def optional_parts(layout: Layout) -> Sequence[str]:
    """Parts that have objects of their own."""
    return [part.name for part in layout.parts if not part.required]


def key_of(member: Member) -> BlockKey:
    """The key of a member of required parts, or of one other part."""
    names = [part.part for part in member.parts]
    part = None if set(names) >= set(member.record.layout.required) else names[0]
    return BlockKey(member.record.fingerprint, member.depth, member.hash, part)
