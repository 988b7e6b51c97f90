"""Fixtures of the engine tests: tiny models, a store of their own, engines that record logits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine import blas

# Tiny products gain nothing from threads, and lose much while other programs keep the cores busy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
blas.preload()  # before anything here imports mlx.core

from tiny_model import write_model  # noqa: E402

import kvdb  # noqa: E402
from engine import Engine, EngineOptions, ModelOptions  # noqa: E402
from kvdb.store import Store  # noqa: E402

if TYPE_CHECKING:
    from explain_bench import Bench, Make

MakeEngine = Callable[..., Engine]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the user's cache folder, but for the BLAS loaded above."""
    monkeypatch.setenv("KVDB_CACHE", str(tmp_path_factory.mktemp("cache")))


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(autouse=True)
def _no_hidden_failures(request: pytest.FixtureRequest) -> Iterator[None]:
    """A failing store fails no request, so that a bug could hide: unless a test looks at the log
    itself (caplog), nothing may be logged as a warning."""
    handler = _Warnings()
    logger = logging.getLogger("kvdb")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if "caplog" not in request.fixturenames:
        assert handler.messages == []


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer llama in float32, with a tokenizer of single characters."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with kvdb.open(tmp_path / "store", min_free_bytes=0) as opened:
        yield opened


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Engines that are closed when the test ends (before its store)."""
    made: list[Engine] = []

    def make(
        store: Store | None,
        model: Path,
        *,
        block_tokens: int = 256,
        step: int | None = None,
        salt: bytes = b"",
        **options: object,
    ) -> Engine:
        names = {field.name for field in fields(EngineOptions)}
        mine = {name: options.pop(name) for name in list(options) if name in names}
        engine = Engine(
            store,
            str(model),
            model_options=ModelOptions(**options),  # type: ignore[arg-type]
            options=EngineOptions(block_tokens, step, salt, **mine),  # type: ignore[arg-type]
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with the chat template of a real one."""
    from chat_model import write_chat_model

    return write_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture
def bench(chat_model: Path, store: Store, make_engine: MakeEngine) -> Make:
    """Makes an engine to ask for pairs of requests."""
    from explain_bench import BLOCK, Bench

    def make(model: Path = chat_model, block_tokens: int = BLOCK, **options: object) -> Bench:
        return Bench(store, make_engine(store, model, block_tokens=block_tokens, **options), model)

    return make


@pytest.fixture
def always_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute faster than a busy machine fetches: as if they were slow."""
    from engine.builds import Speed

    monkeypatch.setattr(Speed, "seconds_per_token", 1.0)
