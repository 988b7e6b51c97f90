"""A prefix computed on one machine is worth the same on another."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import Run, equal, prompt_tokens, run, write_model
from zoo import write_species

import kvdb
from kvdb.errors import SnapshotRejected
from kvdb.store import Store
from kvdb.writer import Payload

PROMPT = prompt_tokens(150)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    with kvdb.open(tmp_path / "other", min_free_bytes=0) as opened:
        yield opened


def move(a: Store, b: Store) -> None:
    """By a snapshot, as between two machines."""
    target = io.BytesIO()
    a.export_snapshot(target)
    b.import_snapshot(io.BytesIO(target.getvalue()))


@pytest.mark.parametrize("reuse", ["max", "exact"])
def test_the_first_request_there_is_a_full_skip(
    tmp_path: Path, store: Store, other: Store, make_engine: Any, reuse: str
) -> None:
    """Restore reports success, and nothing is computed again: by a model under another name."""
    model = write_model(tmp_path / "here")
    cold = run(make_engine(store, model, block_tokens=64), PROMPT, reuse=reuse, max_tokens=12)
    move(store, other)
    engine = make_engine(other, write_model(tmp_path / "there"), block_tokens=64)
    first = run(engine, PROMPT, reuse=reuse, max_tokens=12)
    assert (first.stats.skip, first.stats.computed_tokens) == ("full", 0)
    assert (first.ids, first.text) == (cold.ids, cold.text)
    assert equal(cold, first, reuse)
    # Only what is new of a longer prompt is prefilled.
    longer = run(engine, [*PROMPT, *prompt_tokens(20, 5)], reuse="max")
    assert longer.stats.computed_tokens <= 20
    changed = make_engine(other, write_model(tmp_path / "changed", seed=1), block_tokens=64)
    assert run(changed, PROMPT, reuse=reuse).stats.restored_tokens == 0


def test_other_state_under_the_same_hashes_would_be_seen(
    tmp_path: Path, store: Store, other: Store, make_engine: Any
) -> None:
    """The twin of the test above, so that its comparisons can fail: one layer's values differ."""
    model = write_model(tmp_path / "model")
    here = make_engine(store, model, block_tokens=64)
    there = make_engine(other, model, block_tokens=64)
    run(here, PROMPT)
    run(there, [5])
    assert store.flush()
    tokens = np.array(PROMPT, dtype=np.uint32)
    changed: list[Payload] = []
    for block in store.match(store.namespaces()[0], tokens).blocks:
        parts = {name: np.array(store.read_part(part)) for name, part in block.parts.items()}
        parts["kv:0"].view(np.float32)[-100:] *= 2
        changed.append(Payload(block.index, parts))
    assert other.put(other.namespaces()[0], tokens, changed).wait().stored == len(changed)
    right, wrong = (run(engine, [*PROMPT, 3], max_tokens=12) for engine in (here, there))
    assert wrong.stats.restored_tokens == right.stats.restored_tokens > 0
    assert not equal(right, wrong, "max")


def test_a_failed_import_damages_nothing(
    tmp_path: Path, store: Store, other: Store, make_engine: Any
) -> None:
    model = write_model(tmp_path / "model")
    here, there = (
        make_engine(store, model, block_tokens=64),
        make_engine(other, model, block_tokens=64),
    )
    run(here, prompt_tokens(150, 9))
    before = run(there, PROMPT, max_tokens=12)
    target = io.BytesIO()
    store.export_snapshot(target)
    data = bytearray(target.getvalue())
    data[len(data) * 2 // 3] ^= 1
    with pytest.raises(SnapshotRejected):
        other.import_snapshot(io.BytesIO(bytes(data)))
    after = run(there, PROMPT, max_tokens=12)
    assert after.stats.skip == "full"
    assert equal(before, after, "max")


@pytest.mark.parametrize("species", ["qwen3_next", "gemma3_text", "llama, 8-bit KV"])
def test_no_snapshot_of_a_hybrid_model_is_incomplete(
    tmp_path: Path, store: Store, other: Store, make_engine: Any, species: str
) -> None:
    """Boundary states, windows and logits go along: hits there equal those here."""
    options = {"kv_bits": 8, "kv_group_size": 32} if "8-bit" in species else {}
    model = write_species(tmp_path / "model", species)
    prompts = [PROMPT, [*PROMPT, *prompt_tokens(30, 5)], [*PROMPT[:100], *prompt_tokens(30, 6)]]
    run(make_engine(store, model, block_tokens=32, **options), PROMPT)
    move(store, other)
    results: list[list[Run]] = []
    for each in (store, other):
        engine = make_engine(each, model, block_tokens=32, **options)
        results.append([run(engine, prompt, max_tokens=8, store=False) for prompt in prompts])
    assert [run.stats.skip for run in results[0][:2]] == ["full", "partial"]
    for here, there in zip(*results, strict=True):
        assert there.stats.skip == here.stats.skip
        assert there.stats.restored_tokens == here.stats.restored_tokens
        assert equal(here, there, "max")
