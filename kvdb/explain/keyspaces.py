"""Namespaces as explanations see them: which one a prompt belongs to, how another one differs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvdb.driver import Connection
from kvdb.identity import ModelIdentity
from kvdb.shards import NamespaceRecord

# The newest ones are enough: each costs hashing the prompt once.
MOST_SPACES = 64
KEY_SPACES = (
    "SELECT id, fingerprint, model, identity, layout, block_tokens, salt, build "
    "FROM namespaces ORDER BY used_at DESC, id DESC LIMIT ?"
)
KEY_SPACE = (
    "SELECT id, fingerprint, model, identity, layout, block_tokens, salt, build "
    "FROM namespaces WHERE id = ?"
)


@dataclass(frozen=True, slots=True)
class KeySpace:
    """A namespace, or with ``id`` None one that is asked for and not in the store. ``kv_bits`` is
    None for a cache that is not quantised."""

    id: int | None
    fingerprint: bytes | None
    model: str
    identity: ModelIdentity
    block_tokens: int
    kv_bits: int | None = None
    kv_group_size: int | None = None
    salt: bytes = b""
    build: str | None = None

    @classmethod
    def of(cls, record: NamespaceRecord) -> KeySpace:
        """The key space of a namespace that need not be in the store."""
        bits, group = _quantisation(record.layout.to_json())
        return cls(
            None,
            record.fingerprint,
            record.model,
            record.identity,
            record.block_tokens,
            bits,
            group,
            record.salt,
            record.build,
        )

    def same_state(self, other: KeySpace) -> bool:
        """Do both hold the same state, but for what a build may change?"""
        return not [code for code, _ in differences(self, other) if code != "other_build"]


def key_spaces(connection: Connection) -> list[KeySpace]:
    """The store's namespaces, the last used first."""
    return [_space(*row) for row in connection.execute(KEY_SPACES, (MOST_SPACES,))]


def find_space(spaces: Sequence[KeySpace], wanted: KeySpace) -> KeySpace:
    """The one of ``spaces`` that a prompt for ``wanted`` belongs to, else ``wanted`` itself. Where
    the digest of the weights is not known, the model's name and config stand for it."""
    for space in spaces:
        known = wanted
        if not wanted.identity.weights and space.model == wanted.model:
            identity = replace(wanted.identity, weights=space.identity.weights)
            known = replace(wanted, identity=identity)
        if known.same_state(space):
            return space
    return wanted


def key_space(connection: Connection, namespace_id: int) -> KeySpace | None:
    row = connection.execute(KEY_SPACE, (namespace_id,)).fetchone()
    return None if row is None else _space(*row)


def _space(
    id_: int,
    fingerprint: bytes,
    model: str,
    identity: str,
    layout: str,
    block_tokens: int,
    salt: bytes,
    build: str | None,
) -> KeySpace:
    bits, group = _quantisation(layout)
    return KeySpace(
        id_,
        bytes(fingerprint),
        model,
        ModelIdentity.from_json(identity),
        block_tokens,
        bits,
        group,
        bytes(salt),
        build,
    )


def _quantisation(layout: str) -> tuple[int | None, int | None]:
    """Bits and group size of the first layer kind that is quantised."""
    for kind in json.loads(layout)["kinds"]:
        attributes = dict(kind["attributes"])
        if isinstance(attributes.get("bits"), int):
            group = attributes.get("group_size")
            return attributes["bits"], group if isinstance(group, int) else None
    return None, None


def differences(own: KeySpace, other: KeySpace) -> list[tuple[str, str]]:
    """``(code, what the other one has)`` for everything in which two namespaces differ, the
    weightiest first; empty when they are the same."""
    mine, theirs = own.identity, other.identity
    found: list[tuple[str, str]] = []
    if mine.weights != theirs.weights or mine.code != theirs.code:
        found.append(("other_model", f"another model ({other.model or 'without a name'})"))
    elif mine.config != theirs.config or dict(mine.overrides) != dict(theirs.overrides):
        found.append(("other_config", "another config of this model"))
    if mine.adapters != theirs.adapters:
        found.append(("other_adapter", _adapters(mine.adapters, theirs.adapters)))
    if (own.kv_bits, own.kv_group_size) != (other.kv_bits, other.kv_group_size):
        bits = "an unquantised KV cache"
        if other.kv_bits is not None:
            bits = f"{other.kv_bits}-bit KV in groups of {other.kv_group_size}"
        found.append(("other_kv_bits", bits))
    if own.block_tokens != other.block_tokens:
        found.append(("other_block_size", f"blocks of {other.block_tokens} tokens"))
    if own.salt != other.salt:
        found.append(("other_salt", "another tenant's salt"))
    if own.build != other.build:
        found.append(("other_build", "another build of MLX, hardware or BLAS"))
    return found


def _adapters(mine: Sequence[str], theirs: Sequence[str]) -> str:
    if not theirs:
        return "no adapter"
    return "another adapter" if mine else "an adapter"
