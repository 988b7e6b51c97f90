"""Any parts of a hybrid model's chain may be gone, and any prompt may follow: equal to cold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cache_table import BLOCK, MODES, open_engine, other, use_space
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import Run, equal, prompt_tokens, run
from zoo import write_species

import kvdb
from engine import Engine
from kvdb.reader import Damaged
from kvdb.store import Store

LENGTH = 7 * BLOCK + 5
PROMPT = prompt_tokens(LENGTH, seed=11)
SPECIES = ("gemma3_text", "gpt_oss", "falcon_h1 (CacheList)", "recurrent_gemma")
OPTIONS: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}
spaces = iter(range(1, 1 << 30))


class Pair:
    """A store and an engine of one species, and cold runs remembered."""

    def __init__(self, store: Store, engine: Engine, cold: Engine) -> None:
        self.store, self.engine = store, engine
        self._cold_engine = cold
        self._cold: dict[tuple[str, int], Run] = {}

    def cold(self, mode: str, common: int) -> Run:
        if (mode, common) not in self._cold:
            self._cold[mode, common] = run(self._cold_engine, prompt(common), reuse=mode, **OPTIONS)
        return self._cold[mode, common]


def prompt(common: int) -> list[int]:
    """The stored prompt, or one that leaves it after ``common`` tokens."""
    return PROMPT if common == LENGTH else [*PROMPT[:common], *other(PROMPT[common:], 20)]


@pytest.fixture(scope="module", params=SPECIES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp("holes")
    model = write_species(folder / "model", request.param)
    mx.disable_compile()
    with (
        kvdb.open(folder / "store", min_free_bytes=0) as store,
        open_engine(store, model, request.param) as engine,
        open_engine(None, model, request.param) as cold,
    ):
        yield Pair(store, engine, cold)
    mx.enable_compile()


@pytest.mark.parametrize("mode", MODES)
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    gone=st.sets(st.tuples(st.integers(0, 7), st.sampled_from(["kv:0", "kv:1", "state:0"]))),
    common=st.sampled_from([LENGTH, LENGTH - 1, 5 * BLOCK + 3, 4 * BLOCK, 2 * BLOCK - 1]),
    boundary=st.sampled_from([3 * BLOCK, 4 * BLOCK + 7]),
)
def test_any_parts_may_be_gone(
    pair: Pair, mode: str, gone: set[tuple[int, str]], common: int, boundary: int
) -> None:
    store, engine = pair.store, pair.engine
    namespace = use_space(engine, store, next(spaces))
    run(engine, PROMPT, reuse=mode, boundaries=(boundary,), **{**OPTIONS, "max_tokens": 1})
    blocks = store.match(namespace, PROMPT).blocks
    for depth, part in gone:
        location = store.locate([blocks[depth].id]).get((blocks[depth].id, part))
        if location is not None:
            store.report_damage(location, Damaged("on purpose"))
    for _ in range(2):  # the second time with what the first one mended
        warm = run(engine, prompt(common), reuse=mode, **OPTIONS)
        assert equal(pair.cold(mode, common), warm, mode)
        stats = warm.stats
        assert stats.restored_tokens + stats.refilled_tokens + stats.computed_tokens == len(
            prompt(common)
        )
        assert stats.forwarded_prompt_tokens == stats.refilled_tokens + stats.computed_tokens
    assert stats.skip == "full"
