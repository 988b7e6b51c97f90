"""A loaded model beside a store: what every request on the MLX thread works with."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from engine import batchkinds, cachekinds, masking, mlxlm, models
from engine.blas import Blas
from engine.buildcheck import open_storage
from engine.cuda import open_uplink
from engine.device import DeviceBuffers
from engine.events import Request
from engine.generation import Generation
from engine.guard import Guard
from engine.memory import gauges
from engine.options import EngineOptions
from engine.plan import FULL_ATTENTION
from engine.prefill import check_step
from engine.prompt.encode import Prompt, encode
from engine.prompt.memory import TokenMemory
from engine.restore import Buffers, capacity_for
from engine.storage import Storage
from engine.tokenmasks import TokenMasks
from kvdb.errors import KvdbError, ModelError, UsageError
from kvdb.identity import check_block_tokens
from kvdb.layout import Layout
from kvdb.ramtier import RamTier

if TYPE_CHECKING:
    from kvdb.answers import Answer
    from kvdb.store import Store

# Key spaces of salted requests that are kept at hand.
MAX_SALTS = 256
# The RAM tier's budget is the host's: of a device it takes at most this part.
DEVICE_SHARE = 4

log = logging.getLogger("kvdb.engine")


class Worker:
    """A model, its layout, and the namespace its state belongs to. Every method runs on the thread
    that made it. ``observe``, if set, is given the raw logits of every chosen token.

    Raises ModelError or UsageError; a store that cannot be used is logged and left out.
    """

    def __init__(
        self,
        store: Store | None,
        name: str,
        model_options: models.ModelOptions,
        options: EngineOptions,
        blas: Blas,
        guard: Guard | None = None,
    ) -> None:
        began = time.perf_counter()
        self.block_tokens = check_block_tokens(options.block_tokens)
        self.step = check_step(options.step, self.block_tokens)
        self.loaded = models.load(name, model_options)
        self.model = self.loaded.model
        self.blas = blas
        self.observe: Callable[[mx.array], None] | None = None
        self.layout, self.vocabulary = self._layout()
        self.needs = FULL_ATTENTION if self.layout is None else cachekinds.needs(self.layout)
        self.description = mlxlm.build_description(self.model.model, blas)
        self.alone = self._alone()
        self.salt = options.salt
        self._store = store
        self._uplink = open_uplink()
        self._salted: dict[bytes, Storage | None] = {}
        self.storage = self._storage(options.salt)
        self._load_ms = self.loaded.load_seconds * 1e3
        if self.storage is None:
            self._store = None  # it cannot be used
        self.memory: TokenMemory | None = None
        if self.storage is not None and self.loaded.prompts is not None:
            self.memory = TokenMemory(self.loaded.prompts, self.storage.answers)
        self.guard = guard or Guard(options.max_memory, gauges())
        for tier in self._tiers():
            self.guard.include(tier)
        self.guard.settle()
        self.steps = self.guard.steps(self.block_tokens)
        self._warmup_ms = (time.perf_counter() - began) * 1e3 - self._load_ms

    @property
    def facts(self) -> models.ModelFacts:
        loaded = self.loaded
        return models.ModelFacts(
            loaded.name,
            loaded.context,
            self.vocabulary,
            loaded.prompts,
            loaded.answer_style,
            self._load_ms / 1e3,
            self._warmup_ms / 1e3,
        )

    def new_caches(self) -> list[Any]:
        """Empty caches of the model; UsageError where ``kv_bits`` does not fit it."""
        options = self.loaded.options
        return mlxlm.new_cache(self.model.model, options.kv_bits, options.kv_group_size)

    def _tiers(self) -> Sequence[RamTier[Any]]:
        """The store's RAM tiers, that of a device with its budget."""
        store = self._store
        if store is None:
            return ()
        if not mlxlm.host_memory():
            store.device_ram.resize(min(store.ram.budget, mlxlm.device_bytes() // DEVICE_SHARE))
        return store.ram, store.device_ram

    def take(self, request: Request) -> Generation:
        """A request, ready to begin. Raises PromptError or UsageError. The first one bears the
        time it took to load the model and to set up the rest."""
        generation = Generation(self, request, load_ms=self._load_ms, warmup_ms=self._warmup_ms)
        self._load_ms = self._warmup_ms = 0.0
        return generation

    def encode(self, request: Request) -> Prompt:
        """The prompt of a request. Raises PromptError or UsageError."""
        loaded = self.loaded
        recall = None
        if self.memory is not None and request.read:
            recall = partial(self.memory.recall, self._salt_of(request))
        return encode(
            request,
            loaded.prompts,
            loaded.context,
            self.vocabulary,
            loaded=loaded.tokenizer,
            recall=recall,
        )

    def remember(
        self, request: Request, prompt: Prompt, ids: Sequence[int], said: str
    ) -> Answer | None:
        """Remember the tokens of an answer of which the client was told ``said``; what is returned
        goes into the store with the request's record."""
        if self.memory is None or not (request.remember and request.store and request.messages):
            return None
        ended = bool(ids) and not request.ignore_eos and ids[-1] in self.loaded.eos
        salt = self._salt_of(request)
        return self.memory.remember(prompt.text or "", ids, said, salt, ended=ended)

    def _salt_of(self, request: Request) -> bytes:
        return joined_salt(self.salt, request.salt) if request.salt else self.salt

    def state_bytes(self, tokens: int) -> int:
        """How much memory the state of ``tokens`` tokens takes, as far as that is known."""
        if self.layout is None:
            return 0
        whole = capacity_for(tokens, 0)
        return sum(
            part.nbytes(min(whole, part.window or whole))
            for part in self.layout.parts
            if part.kind != "logits"
        )

    def buffers(self, layout: Layout, capacity: int) -> Buffers:
        """What a request restores into: memory that the store can reach, or the device's."""
        if mlxlm.host_memory() or self._store is None:
            return Buffers(layout, capacity)
        return DeviceBuffers(layout, self._store.device_ram, self._uplink)

    def storage_for(self, salt: bytes, tenant: str = "") -> Storage | None:
        """The key space of requests with ``salt``; without one, the engine's own. A new one counts
        in the quota of ``tenant``."""
        if not salt or self.storage is None:
            return self.storage
        if salt not in self._salted:
            while len(self._salted) >= MAX_SALTS:
                del self._salted[next(iter(self._salted))]
            self._salted[salt] = self._storage(joined_salt(self.salt, salt), tenant)
        return self._salted[salt]

    def _alone(self) -> str | None:
        """Why no request of this model can decode together with others, None if it can. A forward
        of two is built, never computed, to see whether the model takes one."""
        caches = self.new_caches(), self.new_caches()
        if reason := batchkinds.alone_reason(caches[0]):
            return reason
        model = self.model.model
        try:
            for each in caches:
                model(mx.zeros((1, 1), mx.uint32), cache=each)
            joined = [batchkinds.join(layers, (1, 1)) for layers in zip(*caches, strict=True)]
            model(mx.zeros((2, 1), mx.uint32), cache=joined)
        except (ValueError, TypeError, AttributeError) as error:
            return f"the model takes no batch: {error}"
        return None

    @cached_property
    def token_masks(self) -> TokenMasks:
        prompts = self.loaded.prompts
        backend = None if prompts is None else prompts.backend
        return TokenMasks(backend, self.vocabulary, self.loaded.eos)

    @cached_property
    def unmaskable(self) -> str | None:
        """Why no part of this model's state can be masked, None if it can."""
        return masking.refusal(mlxlm.CountingModel(self.model.model), self.new_caches)

    def _layout(self) -> tuple[Layout | None, int]:
        try:
            layout, reason, vocabulary = cachekinds.derive_layout(self.model, self.new_caches)
        except (ValueError, RuntimeError) as error:
            bits = self.loaded.options.kv_bits
            if bits is not None:
                raise UsageError(f"kv_bits {bits} does not fit this model: {error}.") from error
            raise ModelError(f"{self.loaded.name} cannot be run: {error}.") from error
        if reason is not None:
            log.warning("the state of %s is not stored: %s", self.loaded.name, reason)
        return layout, vocabulary

    def _storage(self, salt: bytes, tenant: str = "") -> Storage | None:
        if self.layout is None or self._store is None:
            return None
        try:
            return open_storage(
                self._store,
                self.loaded.identity,
                self.layout,
                self.description,
                self.model,
                self.new_caches,
                name=self.loaded.name,
                block_tokens=self.block_tokens,
                salt=salt,
                tenant=tenant,
            )
        except KvdbError as error:
            log.warning("going on without the store: %s", error)
            return None


def joined_salt(engine: bytes, request: bytes) -> bytes:
    """One salt of two, such that no other two give the same."""
    digest = hashlib.sha256(b"kvdb/salt/1\0" + len(engine).to_bytes(8, "little"))
    digest.update(engine + request)
    return digest.digest()
