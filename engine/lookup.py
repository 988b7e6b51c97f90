"""What the store has of one prompt: found once, held until release, planned over, read."""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from engine.accounts import Accounts
from engine.events import Request
from engine.logits import Row
from engine.plan import Plan, plan
from engine.prompt.encode import Prompt
from engine.restore import Buffers, logits_array
from engine.turns import Turn, Wait
from kvdb.segments import last_question

if TYPE_CHECKING:
    from engine.storage import Storage
    from engine.worker import Worker
    from kvdb.match import Match
    from kvdb.sequences import Lease
    from kvdb.sequences import Sequence as Running

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

    @property
    def match(self) -> Match | None:
        return None if self._lease is None else self._lease.match

    @property
    def running(self) -> Running | None:
        """The sequence that holds what was found."""
        return None if self._lease is None else self._lease.sequence

    def find(self) -> Generator[Turn, Row, None]:
        """Look the prompt up, if its request reads. What earlier ones left in the writer's queue is
        part of the store."""
        if self._storage is None or not self._request.read:
            return
        tokens = self._given.tokens
        yield Wait(self._storage.written(tokens))
        self._lease = self._storage.lease(tokens, self._request.reuse, self._request.tenant)
        self._took.match = self.match

    def fork(self, other: Lookup) -> None:
        """Let another request hold what this one does."""
        if other._storage is not None and self._lease is not None:
            other._lease = other._storage.fork(self._lease, other._request.tenant)

    def release(self) -> None:
        """Let go of what is held. Idempotent."""
        if self._storage is not None:
            self._storage.release(self._lease)

    def plan(self, **without: Any) -> Plan:
        """What to do; ``without`` says what could not be read (see :func:`engine.plan.plan`)."""
        request = self._request
        steps = plan(
            self.match,
            len(self._given.tokens),
            request.reuse,
            self._worker.needs,
            maskable=self._maskable,
            **without,
        )
        refused = request.approximate and steps.refilled and not steps.masked
        self._took.unmasked = (self._worker.unmaskable or UNMASKED) if refused else None
        return steps

    @cached_property
    def _maskable(self) -> int:
        """Up to which token holes may be masked."""
        if not self._request.approximate or self._worker.unmaskable is not None:
            return 0
        return last_question(self._given.segments())

    def stored_logits(self) -> mx.array | None:
        """The logits of the prompt's last token, if they are stored and can be read."""
        layout, match = self._worker.layout, self.match
        location = None if match is None else match.logits
        if self._storage is None or location is None or layout is None or layout.logits is None:
            return None
        raw = self._storage.read_part(location)
        return None if raw is None else logits_array(raw, layout.logits)

    def read(self, steps: Plan, buffers: Buffers, *, logits_ok: bool) -> Plan:
        """Read until a plan has all that it needs: each failure makes one that needs less.
        Without ``logits_ok`` such a one does without stored logits."""
        match = self.match
        if self._storage is None or match is None:
            return steps
        lost: frozenset[tuple[int, str]] = frozenset()
        shared_ok = True
        while (read := buffers.fetch(self._storage, steps, match)) is not None:
            self._took.bytes_read += read.nbytes
            self._took.bytes_ram += read.ram_nbytes
            if not read.lost and read.shared_ok:
                break
            self._took.damaged = True
            lost, shared_ok = lost | read.lost, shared_ok and read.shared_ok
            steps = self.plan(lost=lost, shared_ok=shared_ok, logits_ok=logits_ok)
        return steps
