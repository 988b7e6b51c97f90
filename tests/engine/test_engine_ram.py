"""The RAM tier under the engine, and restores on a device that shares no memory with the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_table import CASES, rows
from tiny_model import difference, equal, prompt_tokens, run, write_model

import kvdb
from engine import device, mlxlm
from kvdb.reader import Damaged

BLOCK = 64
PROMPT = prompt_tokens(300)
SLIDING = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 48,
}
ROOMY = 1 << 26


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the host could not reach MLX's memory, with a budget of its own there."""
    monkeypatch.setattr(mlxlm, "host_memory", lambda: False)
    monkeypatch.setattr(mlxlm, "device_bytes", lambda: 1 << 30)


@pytest.fixture(params=["host", "device", "device, layers apart"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "host":
        request.getfixturevalue("as_device")
    if "apart" in request.param:
        monkeypatch.setattr(device, "MOST_ELEMENTS", 1)
    return str(request.param)


@pytest.mark.parametrize(
    ("kind", "reuse"),
    [("full", "exact"), ("half", "exact"), ("quantised", "max"), ("sliding", "max")],
)
def test_state_from_ram_is_that_from_disk(
    tmp_path: Path, make_engine: Any, memory: str, kind: str, reuse: str
) -> None:
    config = SLIDING if kind == "sliding" else {}
    model = write_model(tmp_path / "model", dtype="BF16" if kind == "half" else "F32", **config)
    options = {"kv_bits": 8, "kv_group_size": 32} if kind == "quantised" else {}
    # A value near a border of the quantiser may fall on its other side, by rounding alone.
    limit = {"quantised": 1e-3, "sliding": 1e-4}.get(kind, 0.0)
    with kvdb.open(tmp_path / "store", min_free_bytes=0) as store:
        cold = run(make_engine(None, model, block_tokens=BLOCK, **options), PROMPT, reuse=reuse)
        engine = make_engine(store, model, block_tokens=BLOCK, **options)
        run(engine, PROMPT[:210], reuse=reuse, max_tokens=1)
        engine.close()
    with kvdb.open(tmp_path / "store", min_free_bytes=0, ram=ROOMY) as store:
        engine = make_engine(store, model, block_tokens=BLOCK, **options)
        runs = [run(engine, PROMPT, reuse=reuse, store=False) for _ in range(2)]
        for found in runs:
            assert found.stats.restored_tokens == (210 if reuse == "max" else 192)
            assert difference(cold.logits, found.logits) <= limit
        disk, ram = (found.stats for found in runs)
        assert disk.bytes_read > 0 == disk.bytes_ram
        assert ram.bytes_read == 0 < ram.bytes_ram
        run(engine, PROMPT, reuse=reuse)
        full = run(engine, PROMPT, reuse=reuse)
        assert (full.stats.skip, full.stats.bytes_read) == ("full", 0)
        assert difference(cold.logits, full.logits) <= limit
        engine.close()


@pytest.mark.parametrize("species", ["deepseek_v3 (MLA)", "deepseek_v32 (CacheList)", "qwen3_next"])
def test_every_kind_of_part_finds_its_way_to_a_device(
    tmp_path: Path, as_device: None, species: str
) -> None:
    """Keys and values of different shapes, composite caches, states beside attention."""
    cases = tuple(case for case in CASES if case.name in ("at a state boundary", "a hole"))
    for row in rows(tmp_path, species, "max", cases):
        assert row.restored > 0
        assert max(row.apart, row.ram_apart) <= row.limit, row


def test_damage_on_the_way_to_a_device_is_refilled(
    tiny: Path,
    tmp_path: Path,
    make_engine: Any,
    as_device: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with kvdb.open(tmp_path / "store", min_free_bytes=0, ram=ROOMY) as store:
        cold = run(make_engine(None, tiny, block_tokens=BLOCK), PROMPT)
        engine = make_engine(store, tiny, block_tokens=BLOCK)
        run(engine, PROMPT)
        second = bytes.fromhex(store.sql("SELECT hash FROM block_usage WHERE depth = 1").rows[0][0])
        store.ram.clear()
        reads = store.reader.read_raw

        def damaged(location: Any, into: Any) -> None:
            reads(location, into)
            if location.hash == second:
                raise Damaged("on purpose")

        monkeypatch.setattr(store.reader, "read_raw", damaged)
        refilled = run(engine, PROMPT)
        assert (refilled.stats.skip, refilled.stats.refilled_tokens) == ("refill", BLOCK)
        assert equal(cold, refilled, "max")


def test_what_a_live_cache_does_never_reaches_the_tier(
    tiny: Path, tmp_path: Path, make_engine: Any, memory: str
) -> None:
    """vmlx#198: two long continuations of one restored prefix, each equal to its cold run, and
    the tier still holds the bits that were let in."""
    with kvdb.open(tmp_path / "store", min_free_bytes=0, ram=ROOMY) as store:
        engine = make_engine(store, tiny, block_tokens=BLOCK)
        tier = store.ram if memory == "host" else store.device_ram
        run(engine, PROMPT[:256])
        tails = [prompt_tokens(40, seed=seed) for seed in (5, 6)]
        first = [run(engine, PROMPT[:256] + t, max_tokens=80, store=False) for t in tails]
        before = {key: held(e.value) for key, e in tier._entries.items()}
        again = [run(engine, PROMPT[:256] + t, max_tokens=80, store=False) for t in tails]
        after = {key: held(e.value) for key, e in tier._entries.items()}
        assert before == after != {}
        cold = make_engine(None, tiny, block_tokens=BLOCK)
        for tail, *warm in zip(tails, first, again, strict=True):
            reference = run(cold, PROMPT[:256] + tail, max_tokens=80)
            for found in warm:
                assert found.stats.restored_tokens == 256
                assert equal(reference, found, "max")


def held(value: Any) -> bytes:
    return np.asarray(value).tobytes()
