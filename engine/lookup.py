"""What the store has of one prompt: found once, held until release, planned over, read."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from engine import mlxlm
from engine.accounts import Accounts
from engine.buildcheck import compare
from engine.events import Request
from engine.logits import Row
from engine.plan import Plan, plan
from engine.prompt.encode import Prompt
from engine.remote import Remotes, objects
from engine.restore import Buffers, logits_array
from engine.turns import Turn, Wait
from kvdb.segments import last_question

if TYPE_CHECKING:
    from engine.storage import Bytes, Read, Storage
    from engine.worker import Worker
    from kvdb.match import Match
    from kvdb.sequences import Lease
    from kvdb.sequences import Sequence as Running
    from kvdb.writer import Ticket

UNMASKED = "too much is missing, or it is in the first block or the last message"


class Lookup:
    """Without ``storage`` nothing is found. What reading takes is added to ``took``."""

    def __init__(
        self,
        worker: Worker,
        storage: Storage | None,
        request: Request,
        given: Prompt,
        took: Accounts,
    ) -> None:
        self._worker = worker
        self._storage = storage
        self._request = request
        self._given = given
        self._took = took
        self._lease: Lease | None = None
        self._match: Match | None = None
        self._remotes: Remotes | None = None

    @property
    def match(self) -> Match | None:
        """What was found, here and in remotes."""
        return self._match

    @property
    def tickets(self) -> Sequence[Ticket]:
        """Of puts of what came from remotes."""
        return () if self._remotes is None else self._remotes.tickets

    @property
    def running(self) -> Running | None:
        """The sequence that holds what was found."""
        return None if self._lease is None else self._lease.sequence

    def find(self) -> Generator[Turn, Row, None]:
        """Look the prompt up, if its request reads: here, then in remotes. What earlier ones left
        in the writer's queue is part of the store."""
        storage, request = self._storage, self._request
        if storage is None or not request.read:
            return
        yield Wait(storage.written(self._given.tokens))
        self._look(storage)
        yield from self._check_builds(storage)
        tier = storage.store.remotes
        if tier is not None and self._match is not None:
            exact = request.reuse == "exact"
            self._remotes = Remotes(storage, tier, exact=exact, fill=request.store)
            yield from self._ask(storage, self._remotes)
        self._took.match = self._match

    def _look(self, storage: Storage) -> None:
        storage.release(self._lease)
        request = self._request
        self._lease = storage.lease(self._given.tokens, request.reuse, request.tenant)
        self._match = None if self._lease is None else self._lease.match

    def _ask(self, storage: Storage, remotes: Remotes) -> Generator[Turn, Row, None]:
        """Extend the match by what remotes have."""
        match = self._match
        if match is None:
            return
        self._match = yield from remotes.extend(match, self._plan)
        remotes.begin(self.running)
        self._took.remote = remotes.use
        self._took.remote_blocks = remotes.blocks
        if self._match is match or mlxlm.host_memory():
            return
        # Other devices are filled from the store: what remotes have goes there first.
        if storage.store.read_only or not self._request.store:
            remotes.use.decision = "recomputed"
        else:
            names = objects(self._match, self._plan(self._match))
            if (yield from remotes.bring(names)):
                remotes.failed()
            yield from self._check_sample(storage, remotes)
        self._look(storage)
        yield from self._check_builds(storage)

    # -- builds ------------------------------------------------------------------------------

    def _check_builds(self, storage: Storage) -> Generator[Turn, Row, None]:
        """Compare a block of each build whose state is here and was never compared; look again
        where that made a difference."""
        match = self._match
        if match is None or not match.distrusted:
            return
        unchecked = {id_ for id_, verdict in match.distrusted.items() if verdict == "unchecked"}
        compared = False
        for block in match.blocks:
            if block.build_id not in unchecked:
                continue
            digest = storage.builds.digest(block.build_id)
            if digest is None or storage.builds.verdict(digest) != "check":
                unchecked.discard(block.build_id)
                continue
            stored = {
                name: raw
                for name, part in block.parts.items()
                if name != "logits" and (raw := storage.read_part(part)) is not None
            }
            if stored.keys() >= set(match.namespace.layout.required):
                unchecked.discard(block.build_id)
                yield from self._compare(storage, digest, block.start, block.end, stored)
                compared = True
        if compared:
            self._look(storage)

    def _check_sample(self, storage: Storage, remotes: Remotes) -> Generator[Turn, Row, bool]:
        """Compare the block for whose build's sake a fetch ended early, if there is one; whether
        there was."""
        member = remotes.unchecked()
        if member is None or member.build is None:
            return False
        parts = {part.part: member.raw(part) for part in member.parts if part.part != "logits"}
        if not parts or not remotes.compares:
            remotes.refuse(member.build)
            return True
        start = member.depth * member.record.block_tokens
        yield from self._compare(storage, member.build, start, start + member.token_count, parts)
        return True

    def _compare(
        self, storage: Storage, digest: str, start: int, end: int, stored: dict[str, Bytes]
    ) -> Generator[Turn, Row, None]:
        worker = self._worker
        tokens = self._given.tokens[:end]
        steps = compare(storage.namespace, tokens, start, stored, worker.model, worker.new_caches())
        while True:
            try:
                next(steps)
            except StopIteration as done:
                storage.builds.judge(digest, done.value)
                return
            yield Wait(lambda: True)

    def fill(self, index: int | None = None) -> None:
        """Before block ``index`` is put (None: at the end), what came from remotes and stands
        before it goes into the store."""
        if self._remotes is not None:
            self._remotes.release(sys.maxsize if index is None else index)

    def fork(self, other: Lookup) -> None:
        """Let another request hold what this one does."""
        if other._storage is not None and self._lease is not None:
            other._lease = other._storage.fork(self._lease, other._request.tenant)
            other._match = self._match

    def release(self) -> None:
        """Let go of what is held. Idempotent."""
        if self._storage is not None:
            self._storage.release(self._lease)

    def plan(self, **without: Any) -> Plan:
        """What to do; ``without`` says what could not be read (see :func:`engine.plan.plan`)."""
        request = self._request
        steps = self._plan(self._match, **without)
        refused = request.approximate and steps.refilled and not steps.masked
        self._took.unmasked = (self._worker.unmaskable or UNMASKED) if refused else None
        return steps

    def _plan(self, match: Match | None, **without: Any) -> Plan:
        return plan(
            match,
            len(self._given.tokens),
            self._request.reuse,
            self._worker.needs,
            maskable=self._maskable,
            **without,
        )

    @cached_property
    def _maskable(self) -> int:
        """Up to which token holes may be masked."""
        if not self._request.approximate or self._worker.unmaskable is not None:
            return 0
        return last_question(self._given.segments())

    def stored_logits(self) -> Generator[Turn, Row, mx.array | None]:
        """The logits of the prompt's last token, if they are stored and can be read."""
        layout, match = self._worker.layout, self._match
        location = None if match is None else match.logits
        if self._storage is None or location is None or layout is None or layout.logits is None:
            return None
        if location.is_remote and self._remotes is not None and match is not None:
            raw = yield from self._remotes.logits(len(match.blocks) - 1)
        else:
            raw = self._storage.read_part(location)
        return None if raw is None else logits_array(raw, layout.logits)

    def read(self, steps: Plan, buffers: Buffers, *, logits_ok: bool) -> Generator[Turn, Row, Plan]:
        """Read until a plan has all that it needs: each failure makes one that needs less.
        Without ``logits_ok`` such a one does without stored logits."""
        storage, match, remotes = self._storage, self._match, self._remotes
        if storage is None or match is None:
            return steps
        lost: frozenset[tuple[int, str]] = frozenset()
        shared_ok = True
        while (read := (yield from self._fetch(storage, match, steps, buffers))) is not None:
            self._took.bytes_read += read.nbytes
            self._took.bytes_ram += read.ram_nbytes
            if not read.lost and read.shared_ok:
                break
            if remotes is not None and (yield from self._check_sample(storage, remotes)):
                continue  # what came before is there, and the rest may be asked for now
            here = {name for name in read.lost if not _is_remote(match, *name)}
            if remotes is not None and len(here) < len(read.lost):
                remotes.failed()
            self._took.damaged = self._took.damaged or bool(here) or not read.shared_ok
            lost, shared_ok = lost | read.lost, shared_ok and read.shared_ok
            steps = self.plan(lost=lost, shared_ok=shared_ok, logits_ok=logits_ok)
        return steps

    def _fetch(
        self, storage: Storage, match: Match, steps: Plan, buffers: Buffers
    ) -> Generator[Turn, Row, Read | None]:
        """Read what a plan still needs; while some of it comes from remotes, others have their
        turns."""
        if self._remotes is None or not match.elsewhere or not objects(match, steps):
            return buffers.fetch(storage, steps, match)
        wants = buffers.wants(steps, match)
        if not wants:
            return None
        read = yield from self._remotes.fetched(lambda fetch: storage.read(match, wants, fetch))
        buffers.loaded(steps, read)
        return read


def _is_remote(match: Match, index: int, part: str) -> bool:
    reference = match.blocks[index].parts.get(part)
    return reference is not None and reference.is_remote
