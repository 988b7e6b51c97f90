"""A loaded model beside a store: what every request on the MLX thread works with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from engine import cachekinds, mlxlm, models
from engine.blas import Blas
from engine.buildcheck import open_storage
from engine.events import Event, Request
from engine.generation import Generation
from engine.options import EngineOptions
from engine.plan import FULL_ATTENTION
from engine.prefill import check_step
from engine.storage import Storage
from kvdb.errors import KvdbError, ModelError, UsageError
from kvdb.identity import check_block_tokens
from kvdb.layout import Layout

if TYPE_CHECKING:
    from kvdb.store import Store

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
        self.storage = None if store is None else self._storage(store, options.salt)
        self._load_ms = self.loaded.load_seconds * 1e3
        self._warmup_ms = (time.perf_counter() - began) * 1e3 - self._load_ms

    def new_caches(self) -> list[Any]:
        """Empty caches of the model; UsageError where ``kv_bits`` does not fit it."""
        options = self.loaded.options
        return mlxlm.new_cache(self.model.model, options.kv_bits, options.kv_group_size)

    def run(self, request: Request, cancelled: Callable[[], bool]) -> Iterator[Event]:
        """The events of one request. Raises PromptError or UsageError before the first event. The
        first request bears the time it took to load the model and to set up the rest."""
        load_ms, self._load_ms = self._load_ms, 0.0
        warmup_ms, self._warmup_ms = self._warmup_ms, 0.0
        return Generation(self, request, cancelled, load_ms, warmup_ms).events()

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

    def _storage(self, store: Store, salt: bytes) -> Storage | None:
        if self.layout is None:
            return None
        try:
            return open_storage(
                store,
                self.loaded.identity,
                self.layout,
                self.description,
                self.model,
                self.new_caches,
                name=self.loaded.name,
                block_tokens=self.block_tokens,
                salt=salt,
            )
        except KvdbError as error:
            log.warning("going on without the store: %s", error)
            return None
