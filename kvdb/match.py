"""What of a prompt is stored: :class:`Match` and how it is found."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvdb import index
from kvdb.driver import Connection
from kvdb.identity import ExtraKey, Tokens, chain_hashes, encode_extra, extra_by_block
from kvdb.layout import Layout

if TYPE_CHECKING:
    from kvdb.reader import Location

# The deepest tails come first: more than these are not looked at.
MAX_STATE_TAILS = 256
VERDICTS = "SELECT id, verdict FROM builds WHERE namespace_id = ?"
NOWHERE = -1


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Namespace:
    """One key space of an open store."""

    id: int
    fingerprint: bytes
    model: str
    layout: Layout
    block_tokens: int


class Trust(NamedTuple):
    """Whose blocks a reader uses: its ``own`` build's (None: nobody's), those of builds that it
    ``compared`` itself, and where its own is compatible, of all that are."""

    own: int | None
    compared: Collection[int] = ()

    def distrusted(self, verdicts: Sequence[tuple[int, str]]) -> dict[int, str]:
        """Of all builds of a namespace those not to be used. To one that is not compatible no
        other was compared."""
        known = self.own is None or (self.own, "compatible") in verdicts
        return {
            build: verdict if verdict != "compatible" else "unchecked"
            for build, verdict in verdicts
            if build != self.own
            and build not in self.compared
            and not (known and verdict == "compatible")
        }


@dataclass(slots=True)
class MatchedBlock:
    """A stored block of the prompt, not to be changed. ``live`` is False for a hole: its payload is
    gone, or it may not be used: in exact mode, or as another build computed it. The ``id`` of one
    that only a remote has is negative."""

    id: int
    hash: bytes
    index: int
    start: int
    token_count: int
    live: bool
    exact: bool
    build_id: int | None
    parts: dict[str, PartRef]

    def lies_at(self, place: Location) -> bool:
        """Whether what lies there is this block's as it was matched, not that of a twin that
        replaced it meanwhile: one computed by another build, or not exactly."""
        same = place.hash == self.hash and place.build_id == self.build_id
        return same and place.exact >= self.exact

    @property
    def end(self) -> int:
        return self.start + self.token_count


class PartRef(NamedTuple):
    """One part of a block, and the shard row and byte offset where it lay at the match; or one
    that a remote has."""

    block_id: int
    part: str
    shard_id: int
    offset: int

    @property
    def is_remote(self) -> bool:
        return self.shard_id == NOWHERE


class SharedTail(NamedTuple):
    """A stored block beside the matched ones whose first ``token_count`` tokens are the prompt's:
    a child of the last one, or, in a layout with states, a tail that ends in one."""

    block: MatchedBlock
    token_count: int


@dataclass(frozen=True)
class Match:
    """What of ``tokens`` is stored, as of one moment. Hold a lease to keep it.

    ``hashes`` are those of all blocks of the prompt, of which the first ``matched`` are held.
    ``rows`` are the index's rows of these (see index.CHAIN_PARTS); read ``blocks`` instead.
    ``elsewhere`` are parts that remotes have, by block index: blocks beyond the matched ones,
    what fills holes, what live ones lack. ``distrusted`` are verdicts of builds, by id, whose
    blocks count as holes.
    """

    namespace: Namespace
    tokens: Tokens
    extra_keys: tuple[ExtraKey, ...]
    hashes: tuple[bytes, ...]
    matched: int
    rows: Sequence[tuple[Any, ...]] = field(repr=False)
    exact_build: int | None
    shared: SharedTail | None
    miss_reason: str | None
    distrusted: Mapping[int, str] = field(default_factory=dict)
    elsewhere: Mapping[int, Collection[str]] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> tuple[MatchedBlock, ...]:
        """The matched blocks, root first, holes included."""
        size, exact_build = self.namespace.block_tokens, self.exact_build
        blocks: list[MatchedBlock] = []
        index_, last = self.matched, None
        for id_, token_count, live, exact, build_id, part, *where in self.rows:
            if id_ != last:
                index_ -= 1
                last = id_
                usable = live and (exact_build is None or (exact and build_id == exact_build))
                usable = usable and build_id not in self.distrusted
                block = MatchedBlock(
                    id_,
                    self.hashes[index_],
                    index_,
                    index_ * size,
                    token_count,
                    bool(usable),
                    bool(exact),
                    build_id,
                    {},
                )
                blocks.append(block)
            if part is not None:
                block.parts[part] = PartRef(id_, part, *where)
        blocks.reverse()
        return tuple(self._with_elsewhere(blocks) if self.elsewhere else blocks)

    def _with_elsewhere(self, blocks: list[MatchedBlock]) -> list[MatchedBlock]:
        """The same with what remotes have: what is here goes before what is there."""
        size, required = self.namespace.block_tokens, set(self.namespace.layout.required)
        for index_ in range(len(blocks), 1 + max(self.elsewhere)):
            start = index_ * size
            count = min(size, len(self.tokens) - start)
            blocks.append(
                MatchedBlock(
                    -1 - index_, self.hashes[index_], index_, start, count, False, False, None, {}
                )
            )
        for index_, names in self.elsewhere.items():
            block = blocks[index_]
            parts = {name: PartRef(-1 - index_, name, NOWHERE, 0) for name in names}
            if block.live:
                block.parts = parts | block.parts
            elif required.issubset(parts):
                block.id, block.live, block.parts = -1 - index_, True, parts
        return blocks

    def extended(self, elsewhere: Mapping[int, Collection[str]]) -> Match:
        """The same match with parts that remotes have."""
        return replace(self, elsewhere=elsewhere)

    @property
    def token_count(self) -> int:
        """Tokens covered by ``blocks``, holes included."""
        count = max(self.matched, 1 + max(self.elsewhere, default=-1))
        return min(count * self.namespace.block_tokens, len(self.tokens))

    @cached_property
    def holes(self) -> tuple[int, ...]:
        """Indices into ``blocks`` without a usable payload."""
        return tuple(block.index for block in self.blocks if not block.live)

    @property
    def live_prefix_tokens(self) -> int:
        """Tokens of the leading blocks before the first hole."""
        return self.blocks[self.holes[0]].start if self.holes else self.token_count

    @property
    def reach(self) -> int:
        """Tokens up to which state could be restored, were no payload gone: to the end of the
        blocks and the shared tail, or, in a layout with states, to the deepest of these."""
        shared = self.shared
        tail = 0 if shared is None else shared.block.start + shared.token_count
        states = set(self.namespace.layout.states)
        if not states:
            return max(self.token_count, tail)
        ends = [block.end for block in self.blocks if states <= block.parts.keys()]
        return max([tail, *ends[-1:]])

    @property
    def complete(self) -> bool:
        """True when ``blocks`` cover the whole prompt (holes included)."""
        return len(self.hashes) in (self.matched, 1 + max(self.elsewhere, default=-1))

    @property
    def logits(self) -> PartRef | None:
        """Logits of the prompt's last token, if they are stored."""
        if not self.blocks or not self.complete or not self.blocks[-1].live:
            return None
        return self.blocks[-1].parts.get("logits")

    @property
    def tip_id(self) -> int | None:
        """Row id of the deepest matched block."""
        return self.rows[0][0] if self.rows else None

    @property
    def tip_hash(self) -> bytes | None:
        return self.hashes[self.matched - 1] if self.matched else None


def find_match(
    connection: Connection,
    namespace: Namespace,
    tokens: Tokens,
    extra_keys: Sequence[ExtraKey] = (),
    *,
    exact_build: int | None = None,
    share_tail: bool = True,
    trust: Trust | None = None,
) -> Match:
    """Match ``tokens`` inside one transaction. See :meth:`kvdb.store.Store.lease`."""
    hashes = chain_hashes(namespace.fingerprint, tokens, namespace.block_tokens, extra_keys)
    count, tip_id = index.deepest_held(connection, hashes)
    rows: list[tuple[Any, ...]] = []
    if tip_id is not None:
        rows = connection.execute(index.CHAIN_PARTS, (tip_id,)).fetchall()
    distrusted: Mapping[int, str] = {}
    if trust is not None:
        distrusted = trust.distrusted(connection.execute(VERDICTS, (namespace.id,)).fetchall())
    match = Match(
        namespace,
        tokens,
        tuple(extra_keys),
        tuple(hashes),
        count,
        rows,
        exact_build,
        None,
        None,
        distrusted,
    )
    if share_tail and exact_build is None:
        shared = None
        if namespace.layout.states:
            shared = _state_tail(connection, match)
        elif count < len(hashes) and namespace.layout.cuttable:
            shared = _shared_tail(connection, match)
        if shared is not None:
            match = replace(match, shared=shared)
    reason = _miss_reason(connection, match)
    return match if reason is None else replace(match, miss_reason=reason)


def _shared_tail(connection: Connection, match: Match) -> SharedTail | None:
    """Among the newest children of the last matched block (a full one, since the prompt goes on),
    the one with the longest common prefix."""
    namespace, tokens, count, tip_id = match.namespace, match.tokens, match.matched, match.tip_id
    start = count * namespace.block_tokens
    rest = tokens[start : start + namespace.block_tokens]
    if tip_id is None:
        rows = connection.execute(index.ROOTS, (namespace.id, index.MAX_SIBLINGS)).fetchall()
    else:
        rows = connection.execute(index.CHILDREN, (tip_id, index.MAX_SIBLINGS)).fetchall()
    if not rows:
        return None
    extras = extra_by_block(match.extra_keys, namespace.block_tokens)
    extra = encode_extra(extras.get(count, []))
    best, best_count = None, 0
    for row in rows:
        # Another image in the block makes another state; where it lies is not in the hash.
        if row[7] != extra or row[5] in match.distrusted:
            continue
        count = common_prefix(rest, np.frombuffer(row[6], dtype="<u4"))
        if count > best_count:
            best, best_count = row, count
    return None if best is None else _tail(connection, best, start, best_count)


def _tail(connection: Connection, row: Sequence[Any], start: int, token_count: int) -> SharedTail:
    id_, hash_, depth, tokens, exact, build_id = row[:6]
    parts = {row[0]: PartRef(id_, *row) for row in connection.execute(index.BLOCK_PARTS, (id_,))}
    block = MatchedBlock(id_, hash_, depth, start, tokens, True, bool(exact), build_id, parts)
    return SharedTail(block, token_count)


def _state_tail(connection: Connection, match: Match) -> SharedTail | None:
    """The tail that ends in the deepest state, if that lies deeper than what the matched blocks
    themselves hold, and before the prompt's last token: the last one's logits are not in it."""
    namespace, states = match.namespace, set(match.namespace.layout.states)
    size, last = namespace.block_tokens, len(match.tokens) - 1
    held = [b.index for b in match.blocks if b.live and b.end <= last and states <= b.parts.keys()]
    first = held[-1] if held else -1
    # Tails under the block that holds the deepest state, or under a later one.
    parents = [block.id for block in match.blocks if block.index >= max(first, 0)]
    rows: list[tuple[Any, ...]] = []
    if parents:
        keys: tuple[Any, ...] = (json.dumps(parents), size, MAX_STATE_TAILS)
        rows = connection.execute(index.STATE_TAILS, keys).fetchall()
    if first < 0:
        keys = (namespace.id, size, MAX_STATE_TAILS)
        rows += connection.execute(index.STATE_ROOTS, keys).fetchall()
    extras = extra_by_block(match.extra_keys, size)
    for row in rows:
        depth, count, own = row[2], row[3], np.frombuffer(row[6], dtype="<u4")
        start = depth * size
        if start + count > last or row[7] != encode_extra(extras.get(depth, [])):
            continue
        if row[5] in match.distrusted:
            continue
        if np.array_equal(match.tokens[start : start + count], own):
            tail = _tail(connection, row, start, count)
            if states <= tail.block.parts.keys():
                return tail
    return None


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens are equal."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _miss_reason(connection: Connection, match: Match) -> str | None:
    """Why the prompt is not wholly there; None when it is."""
    exact_build = match.exact_build
    unusable = any(
        not (row[2] and (exact_build is None or (row[3] and row[4] == exact_build)))
        or row[4] in match.distrusted
        for row in match.rows
    )
    if match.complete and not unusable:
        return None
    hole = match.blocks[match.holes[0]] if unusable else None
    if hole is not None and hole.parts:
        return "inexact"  # its payload is there, but not as it is needed: see MatchedBlock.live
    missing = hole.hash if hole is not None else match.hashes[match.matched]
    evicted = connection.execute(index.LAST_EVICTION, (missing,)).fetchone()
    if evicted is not None:
        return str(evicted[0]) if evicted[0] in ("damaged", "missing", "expired") else "evicted"
    if hole is not None:
        return "missing"
    shared = match.shared
    if shared is not None and shared.block.index == match.matched:
        return "diverged" if shared.token_count < shared.block.token_count else "not_stored"
    if match.matched:
        child = connection.execute(index.ANY_CHILD, (match.tip_id,)).fetchone()
        return "diverged" if child else "not_stored"
    live = connection.execute(index.NAMESPACE_BLOCKS, (match.namespace.id,)).fetchone()
    if live is not None and live[0]:
        return "diverged"
    return "new_namespace" if connection.execute(index.ANY_BLOCK).fetchone() else "empty_store"
