"""Prompts kept under a name, and prompts made ready before anyone asks: computed, stored, held."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.events import End, Request
from kvdb.errors import KvdbError, StoreUnavailable, UsageError
from kvdb.identity import Tokens, chain_hashes

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.worker import Worker
    from kvdb.match import Namespace
    from kvdb.store import Store

log = logging.getLogger("kvdb.engine")

FLUSH_SECONDS = 60.0
# Parts of a chat that stay as they are when it goes on; what follows them invites an answer.
LASTING = ("system", "tool", "message")


class Prefix(NamedTuple):
    """The beginning of a prompt whose state can be held, in its key space."""

    namespace: Namespace
    tokens: Tokens

    def filling(self, request: Request) -> Request:
        """What has its state computed and stored, on behalf of who asked ``request``."""
        return Request(
            tokens=self.tokens.tolist(),
            max_tokens=1,
            reuse=request.reuse,
            tenant=request.tenant,
            client=request.client,
            salt=request.salt,
        )

    @property
    def tip_hash(self) -> bytes:
        size = self.namespace.block_tokens
        return chain_hashes(self.namespace.fingerprint, self.tokens, size)[-1]


@dataclass(frozen=True, slots=True)
class Saved:
    """A named sequence of ``tokens`` tokens, of which so many had to be computed."""

    name: str
    tokens: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class Warmed:
    """A prompt or a named sequence that is ready: its tokens, the bytes that were read for it, and
    of how many blocks something is gone. ``ram`` says whether all of it is in the RAM tier."""

    name: str
    tokens: int
    nbytes: int
    lost: int
    ram: bool


def save_sequence(
    engine: Engine, store: Store, name: str, request: Request, ttl_seconds: float | None = None
) -> Saved:
    """Compute what of a prompt is not stored, and hold its state under ``name`` until it is dropped
    or its TTL ends. Of a chat that is the state after its last message: whatever chat begins with
    these messages will hit.

    Raises what :meth:`Engine.generate` and :meth:`Store.sequence` raise, and StoreUnavailable
    where the engine cannot use the store.
    """
    if store.sql("SELECT 1 FROM sequences WHERE name = ?", (name,)).rows:
        raise UsageError(f"There is a sequence named {name!r} already.")
    prefix, computed = _compute(engine, store, request)
    store.sequence(
        prefix.namespace,
        prefix.tip_hash,
        name=name,
        ttl_seconds=ttl_seconds,
        tenant=request.tenant,
    )
    return Saved(name, len(prefix.tokens), computed)


def warm_up(engine: Engine, store: Store, items: Sequence[str | Request]) -> list[Warmed]:
    """Make named sequences and prompts ready: compute what is missing of a prompt, verify all of
    it, and bring it into the RAM tier as far as that has room. What fails is logged and left
    out."""
    done = []
    for item in items:
        try:
            done.append(warm(engine, store, item))
        except KvdbError as error:
            log.warning("%s could not be warmed up: %s", _name(item), error)
    return done


def warm(engine: Engine, store: Store, item: str | Request, salt: bytes = b"") -> Warmed:
    """One of these; a named sequence is one of the key space with ``salt``. Raises KvdbError."""
    name = _name(item)
    if isinstance(item, Request):
        prefix, _ = _compute(engine, store, item)
    else:
        sequence = store.find_sequence(item)
        prefix = Prefix(sequence.namespace, sequence.tokens())
        own = engine.call(lambda worker: _namespace(worker, salt))
        if own is None or own.id != prefix.namespace.id:
            raise UsageError(f"{name} belongs to another model or to other settings.")
    match = store.match(prefix.namespace, prefix.tokens, share_tail=False)
    read = store.preload(match)
    ram = False
    if store.ram.budget:  # a second use: what is seen once will not push it out
        ram = store.preload(match).nbytes == 0
    return Warmed(name, len(prefix.tokens), read.nbytes, len(read.bad), ram)


def _name(item: str | Request) -> str:
    return item if isinstance(item, str) else item.client or "a prompt"


def prefix_of(engine: Engine, store: Store, request: Request) -> Prefix:
    """What of a prompt can be held: of a chat, what its last message ends with. Raises what
    :meth:`Engine.generate` raises for the prompt, and StoreUnavailable where nothing is stored."""

    def find(worker: Worker) -> Prefix | None:
        namespace = _namespace(worker, request.salt, request.tenant)
        return None if namespace is None else Prefix(namespace, _lasting(worker, request))

    prefix = engine.call(find)
    if prefix is None or store.read_only:
        raise StoreUnavailable("The state of this model cannot be stored here.")
    return prefix


def _compute(engine: Engine, store: Store, request: Request) -> tuple[Prefix, int]:
    """See to it that the state of a prompt is stored. Returns it, and how much was computed."""
    prefix = prefix_of(engine, store, request)
    run = engine.generate(prefix.filling(request))
    (end,) = (event for event in run if isinstance(event, End))
    store.flush(FLUSH_SECONDS)
    return prefix, end.stats.computed_tokens + end.stats.refilled_tokens


def _lasting(worker: Worker, request: Request) -> Tokens:
    """The tokens of a prompt without the template's invitation to answer."""
    prompt = worker.encode(request)
    ends = [segment.end for segment in prompt.segments() if segment.kind in LASTING]
    return prompt.tokens[: ends[-1]] if ends else prompt.tokens


def _namespace(worker: Worker, salt: bytes, tenant: str = "") -> Namespace | None:
    storage = worker.storage_for(salt, tenant)
    return None if storage is None else storage.namespace
