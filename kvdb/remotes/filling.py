"""What came from remotes goes into the local store: in order, behind the request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdb.errors import KvdbError
from kvdb.members import Member
from kvdb.remotes.found import ObjectName
from kvdb.writer import Payload, Ticket

if TYPE_CHECKING:
    from kvdb.match import Match
    from kvdb.sequences import Sequence as Running
    from kvdb.store import Store

log = logging.getLogger("kvdb.remotes")

# So much waits for the end of a fetch (the disk has time behind it), and so much behind a gap.
HOLD_BYTES = 48 << 20


class Filling:
    """Takes objects in any order and puts them in that of ``names``, so that parents come first;
    a few at a time, and the rest at the end. What stands on a block that did not come waits until
    that is computed: see :meth:`release`. ``tickets`` are those of its puts; ``running`` goes along
    to the deepest block."""

    def __init__(self, store: Store, match: Match, running: Running | None) -> None:
        self._store = store
        self._match = match
        self._running = running
        self._order: list[ObjectName] = []
        self._at = 0
        self._settled: dict[ObjectName, Member | None] = {}
        self._mutex = threading.Lock()
        self._ids: dict[str, int] = {}
        self._ready: list[Member] = []
        self._gap = False
        self._held: list[Member] = []
        self._came: set[int] = set()  # blocks, by depth
        self._early: dict[int, list[Member]] = {}
        self._provenance: dict[int, tuple[bool, int | None]] = {}
        self.tickets: list[Ticket] = []

    def expect(self, names: Sequence[ObjectName]) -> None:
        with self._mutex:
            self._order += names

    def settle(self, name: ObjectName, member: Member | None) -> None:
        """An object came, or (None) will not."""
        with self._mutex:
            self._settled[name] = member
            while self._at < len(self._order) and self._order[self._at] in self._settled:
                found = self._settled.pop(self._order[self._at])
                self._at += 1
                self._keep(self._in_order(found))
            if _nbytes(self._ready) >= HOLD_BYTES:
                self._flush()

    def finish(self) -> None:
        """Nothing more comes for now."""
        with self._mutex:
            self._flush()

    def release(self, index: int) -> None:
        """Put what waits and stands before block ``index``: what it stands on was put meanwhile."""
        with self._mutex:
            self._ready += [member for member in self._held if member.depth < index]
            self._held = [member for member in self._held if member.depth >= index]
            self._flush()

    def _keep(self, members: Sequence[Member]) -> None:
        for member in members:
            before = member.depth - 1
            here = member.depth <= self._match.matched or before in self._came
            self._gap = self._gap or not here
            if not self._gap:
                self._ready.append(member)
            elif _nbytes(self._held) < HOLD_BYTES:
                self._held.append(member)
            else:
                self._drop("parent_missing", 1)

    def _drop(self, reason: str, blocks: int) -> None:
        ticket = Ticket(blocks)
        ticket.drop(reason)
        ticket.finish()
        self.tickets.append(ticket)

    def _flush(self) -> None:
        ready, self._ready = self._ready, []
        try:
            self._put(ready)
        except KvdbError as error:
            log.warning("what came from a remote is not stored: %s", error)
            self._drop(type(error).__name__, len(ready))

    def _in_order(self, member: Member | None) -> list[Member]:
        """What can be put now: a part that came before its block, such as logits, waits for it."""
        if member is None:
            return []
        blocks = self._match.blocks
        if member.is_whole:
            self._came.add(member.depth)
            return [member, *self._early.pop(member.depth, ())]
        here = member.depth < len(blocks) and blocks[member.depth].live
        if here or member.depth in self._came:
            return [member]
        self._early.setdefault(member.depth, []).append(member)
        return []

    def _put(self, members: Sequence[Member]) -> None:
        run: list[Payload] = []
        last: tuple[bool, int | None] | None = None
        for member in members:
            build_id = None if member.build is None else self._build_id(member.build)
            mine = (member.exact and self._stands_exactly(member.depth, build_id), build_id)
            if member.is_whole:
                self._provenance[member.depth] = mine
            parts = {part.part: member.raw(part) for part in member.parts}
            if run and last == mine and member.depth == run[-1].index:
                run[-1] = Payload(member.depth, {**run[-1].parts, **parts})
                continue
            if run and (last != mine or member.depth != run[-1].index + 1):
                self._submit(run, last)
                run = []
            run.append(Payload(member.depth, parts))
            last = mine
        self._submit(run, last)

    def _submit(self, run: Sequence[Payload], provenance: tuple[bool, int | None] | None) -> None:
        if not run or provenance is None:
            return
        match, last = self._match, run[-1].index
        end = min((last + 1) * match.namespace.block_tokens, len(match.tokens))
        self.tickets.append(
            self._store.put(
                match.namespace,
                match.tokens[:end],
                list(run),
                extra_keys=match.extra_keys,
                origin="import",
                exact=provenance[0],
                build_id=provenance[1],
                advance=self._running if last >= match.matched else None,
                hashes=match.hashes[: last + 1],
            )
        )

    def _build_id(self, digest: str) -> int:
        if digest not in self._ids:
            self._ids[digest] = self._store.build(self._match.namespace, digest, {}).id
        return self._ids[digest]

    def _stands_exactly(self, index: int, build_id: int | None) -> bool:
        """Whether the block before is exact and of the same build, or there is none."""
        if index == 0:
            return True
        before = self._provenance.get(index - 1)
        if before is None and index <= len(self._match.blocks):
            block = self._match.blocks[index - 1]
            before = (block.exact and block.id >= 0, block.build_id)
        return before == (True, build_id)


def _nbytes(members: Sequence[Member]) -> int:
    return sum(member.payload_bytes for member in members)
