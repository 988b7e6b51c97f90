"""Cache kinds: quantised, 16-bit, unknown; each keeps its state apart from the others'."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import difference, equal, prompt_tokens, run, write_model

from engine import ModelOptions
from kvdb.errors import UsageError
from kvdb.store import Store

PROMPT = prompt_tokens(300)
# Three layers of which two slide: mlx-lm gives them RotatingKVCache.
SLIDING = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 64,
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("reuse", ["max", "exact"])
def test_quantised_state_is_cut_and_restored(
    tiny: Path, store: Store, make_engine: Any, bits: int, reuse: str
) -> None:
    options = {"kv_bits": bits, "kv_group_size": 32}
    cold = make_engine(None, tiny, block_tokens=64, **options)
    warm = make_engine(store, tiny, block_tokens=64, **options)
    reference = run(cold, PROMPT, reuse=reuse, max_tokens=20)
    run(warm, PROMPT[:200], reuse=reuse, max_tokens=1)
    partial = run(warm, PROMPT, reuse=reuse, max_tokens=20)
    full = run(warm, PROMPT, reuse=reuse, max_tokens=20)
    assert partial.stats.restored_tokens == (200 if reuse == "max" else 192)
    assert full.stats.skip == "full"
    # A value near a border of the quantiser may fall on its other side, by rounding alone.
    limit = 0.0 if reuse == "exact" else 1e-3
    assert difference(reference.logits, partial.logits) <= limit
    assert difference(reference.logits, full.logits) <= limit


def test_bits_and_group_size_are_part_of_the_key(
    tiny: Path, store: Store, make_engine: Any
) -> None:
    every = [
        {},
        {"kv_bits": 4, "kv_group_size": 32},
        {"kv_bits": 8, "kv_group_size": 32},
    ]
    for options in every:
        engine = make_engine(store, tiny, block_tokens=64, **options)
        assert run(engine, PROMPT).stats.restored_tokens == 0
        assert run(engine, PROMPT).stats.skip == "full"
        engine.close()
    assert len(store.namespaces()) == 3


@pytest.mark.parametrize("dtype", ["BF16"])
def test_sixteen_bit_state_travels_as_bits(
    tmp_path: Path, store: Store, make_engine: Any, dtype: str
) -> None:
    model = write_model(tmp_path / "half", dtype=dtype)
    cold = make_engine(None, model, block_tokens=64)
    warm = make_engine(store, model, block_tokens=64)
    run(warm, PROMPT[:200], reuse="exact", max_tokens=1)
    partial = run(warm, PROMPT, reuse="exact")
    full = run(warm, PROMPT, reuse="exact")
    reference = run(cold, PROMPT, reuse="exact")
    assert {spec.dtype for spec in warm.call(lambda w: w.layout.layers[0].tensors)} == {dtype}
    assert (partial.stats.restored_tokens, full.stats.skip) == (192, "full")
    assert equal(reference, partial, "exact")
    assert equal(reference, full, "exact")


@pytest.mark.parametrize("what", ["unknown", "keep"])
def test_a_cache_class_without_a_kind_works_without_storing(
    tiny: Path,
    store: Store,
    make_engine: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    from mlx_lm.models import cache, llama

    class NewCache(cache.KVCache):
        """A class of a later mlx-lm, say: being like a known one does not make it known."""

    def make(self: Any) -> list[Any]:
        if what == "unknown":
            return [NewCache() for _ in self.layers]
        return [cache.RotatingKVCache(64, keep=4) for _ in self.layers]

    monkeypatch.setattr(llama.Model, "make_cache", make)
    with caplog.at_level(logging.WARNING, logger="kvdb.engine"):
        warm = make_engine(store, tiny)
        runs = [run(warm, PROMPT) for _ in range(2)]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert ("NewCache" if what == "unknown" else "keeps its first tokens") in said[0]
    cold = run(make_engine(None, tiny), PROMPT)
    for again in runs:
        assert np.array_equal(again.logits, cold.logits)
        assert again.stats.computed_tokens == len(PROMPT)
    assert store.namespaces() == []


def test_quantising_what_cannot_be_is_refused(tmp_path: Path, make_engine: Any) -> None:
    model = write_model(tmp_path / "sliding", **SLIDING)
    with pytest.raises(UsageError, match="RotatingKVCache"):
        make_engine(None, model, kv_bits=8)


@pytest.mark.parametrize(
    "bad",
    [{"kv_bits": 5}, {"kv_bits": 4, "kv_group_size": 48}, {"kv_bits": 4, "quantized_kv_start": 1}],
)
def test_bad_quantisation_is_a_usage_error(bad: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        ModelOptions(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("sliding", [False, True])
def test_cut_never_aliases_live_state(
    tiny: Path, tmp_path: Path, make_engine: Any, sliding: bool
) -> None:
    import mlx.core as mx

    from engine.live import LiveState

    def check(worker: Any) -> None:
        live = LiveState(worker.layout, worker.new_caches())
        worker.model(mx.array([PROMPT[:100]]), live.caches)
        parts = {part: live.cut(part, 40, 100) for part in live.parts if part.kind == "kv"}
        kept = {part: raw.copy() for part, raw in parts.items()}
        again = {part: live.cut(part, 40, 100) for part in parts}
        for cache in live.caches:
            cache.offset = 0
        for token in PROMPT[100:250]:
            worker.model(mx.array([[token]]), live.caches)
        live.evaluate()
        for part, raw in parts.items():
            assert raw.flags.c_contiguous
            assert np.array_equal(raw, kept[part])
            assert np.array_equal(raw, again[part])
            assert raw.nbytes == part.nbytes(60)

    model = write_model(tmp_path / "sliding", **SLIDING) if sliding else tiny
    make_engine(None, model).call(check)


def test_layout_names_the_rotary_embedding(tiny: Path, make_engine: Any) -> None:
    attributes = dict(
        make_engine(None, tiny).call(lambda worker: worker.layout.layers[0].attributes)
    )
    assert attributes["rope"] == "plain"
    assert attributes["rope_dims"] == 32
    assert attributes["rope_base"] == 10000.0


def test_deriving_a_layout_counts_no_forward(tiny: Path, make_engine: Any) -> None:
    assert make_engine(None, tiny).call(lambda worker: worker.model.forwarded) == 0
