"""Every cache kind of mlx-lm, restored at every kind of boundary: equal to cold, and the comparison
notices damage. docs/cache_kinds.md is what this finds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cache_table import (
    BLOCK,
    CASES,
    LENGTH,
    MODES,
    PROMPT,
    Case,
    Damaging,
    Row,
    apart,
    document,
    make_hole,
    open_engine,
    rows,
)
from tiny_model import equal, prompt_tokens, run
from zoo import SPECIES, write_species

import kvdb
from engine import mlxlm
from kvdb.store import Store

PAGE = Path(__file__).parent.parent.parent / "docs" / "cache_kinds.md"
RECURRENT = [name for name, about in SPECIES.items() if "ArraysCache" in about.classes]
# Tokens between two states, reckoned by hand: their bytes are at most half of the others'.
STRIDES = {"qwen3_next": 144, "mamba2": 4096, "falcon_h1 (CacheList)": 48, "recurrent_gemma": 16}
found: dict[tuple[str, str], list[Row]] = {}


@pytest.fixture(autouse=True, scope="module")
def _no_compiler() -> Iterator[None]:
    """mx.compile calls the C++ compiler for every new kernel: tens of seconds on a new machine."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def table(folder: Path, species: str, mode: str) -> list[Row]:
    if (species, mode) not in found:
        found[species, mode] = list(rows(folder, species, mode))
    return found[species, mode]


def expected(species: str, case: Case, mode: str) -> tuple[int, int]:
    """(restored, refilled) tokens as DESIGN says."""
    length, whole = len(case.stored), case.common == LENGTH
    if species in RECURRENT:
        points = {length - 1, *case.boundaries}
        if mode == "exact":
            points = {point // BLOCK * BLOCK for point in points}
        stride = STRIDES[species]
        points |= {length, *range(stride, length, stride), 0}
        if mode == "exact":
            points = {at for at in points if at % BLOCK == 0 or at == LENGTH}
    else:
        points = {at for at in range(length + 1) if mode == "max" or at % BLOCK == 0}
        points |= {LENGTH} if whole else set()
    last = LENGTH if whole else min(case.common, LENGTH - 1)
    reached = max(point for point in points if point <= last)
    if case.hole is None:
        return reached, 0
    hole_end = (case.hole + 1) * BLOCK
    before = max(at for at in points if at <= case.hole * BLOCK)
    return reached - (hole_end - before), hole_end - before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("species", SPECIES)
def test_restored_at_every_boundary_equals_cold(tmp_path: Path, species: str, mode: str) -> None:
    for case, row in zip(CASES, table(tmp_path, species, mode), strict=True):
        assert row.apart <= row.limit, row
        assert row.ram_apart <= row.limit, row
        assert row.from_ram, row
        assert (row.restored, row.refilled) == expected(species, case, mode), row
        if row.restored:
            assert row.twin_apart > max(row.limit, 1e-4), row


def test_the_page_in_the_docs_is_this_table(tmp_path: Path) -> None:
    every = [
        row
        for number, (species, mode) in enumerate((s, m) for s in SPECIES for m in MODES)
        for row in table(tmp_path / str(number), species, mode)
    ]
    text = document(every)
    if os.environ.get("KVDB_WRITE_DOCS"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "run with KVDB_WRITE_DOCS=1 to write it anew"


@pytest.mark.parametrize("species", SPECIES)
def test_a_layout_has_the_classes_of_the_model(tmp_path: Path, species: str) -> None:
    with open_engine(None, write_species(tmp_path, species), species) as engine:
        layout = engine.call(lambda worker: worker.layout)
    groups = [layout.layers[part.layers[0]].kind for part in layout.parts if part.kind != "logits"]
    assert tuple(groups) == SPECIES[species].classes


@pytest.mark.parametrize("species", SPECIES)
def test_every_part_matters(tmp_path: Path, store: Store, species: str) -> None:
    """A part that could be anything would not be worth storing, or is read to the wrong place."""
    model = write_species(tmp_path / "model", species)
    options: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "store": False}
    with open_engine(store, model, species) as engine:
        cold = run(engine, PROMPT, **options)
        run(engine, PROMPT[:47], max_tokens=1)
        storage, layout = engine.call(lambda worker: (worker.storage, worker.layout))
        for part in layout.parts:
            if part.kind == "logits" or part.is_mark:
                continue
            engine.call(lambda w, p=part: setattr(w, "storage", Damaging(storage, p.name)))
            damaged = run(engine, PROMPT, **options)
            assert damaged.stats.restored_tokens == 47
            assert apart(cold, damaged) > 1e-4, part.name


@pytest.mark.parametrize("species", SPECIES)
def test_model_class_never_reuses(tmp_path: Path, species: str) -> None:
    """Three turns, each with what was generated before; every class continues at its end, and the
    generated state, cut while decoding across block ends and windows, is the prefilled one."""
    model = write_species(tmp_path / "model", species)
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 30}
    path = tmp_path / "store"
    turn = PROMPT[:21]
    for number in range(3):
        with (
            kvdb.open(path, min_free_bytes=0) as store,
            open_engine(store, model, species) as engine,
        ):
            warm = run(engine, turn, **options)
        with open_engine(None, model, species) as engine:
            cold = run(engine, turn, **options)
        # All but the last generated token went through the model.
        assert warm.stats.restored_tokens == (len(turn) - 13 if number else 0)
        assert apart(cold, warm) <= (1e-3 if SPECIES[species].options else 1e-4)
        turn = [*turn, *warm.ids, *prompt_tokens(12, seed=number + 5)]


def test_memory_that_numpy_cannot_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a discrete GPU state goes through host arrays, both ways."""
    monkeypatch.setattr(mlxlm, "host_memory", lambda: False)
    names = ("llama, 8-bit KV", "gemma3_text", "gpt_oss", "llama4", "falcon_h1 (CacheList)")
    for number, species in enumerate(names):
        for row in rows(tmp_path / str(number), species, "exact", CASES[2:11:4]):
            assert row.apart == 0, row
            assert row.restored or species in RECURRENT, row


@pytest.mark.parametrize("species", ["gemma3_text", "falcon_h1 (CacheList)"])
def test_sixteen_bit_windows_and_states(tmp_path: Path, store: Store, species: str) -> None:
    model = write_species(tmp_path / "half", species, dtype=mx.bfloat16)
    options: dict[str, Any] = {"reuse": "exact", "max_tokens": 4, "ignore_eos": True}
    with open_engine(None, model, species) as engine:
        cold = run(engine, PROMPT, **options)
    with open_engine(store, model, species) as engine:
        run(engine, PROMPT[:50], **options)
        layout = engine.call(lambda worker: worker.layout)
        warm = run(engine, PROMPT, **options)
        again = run(engine, PROMPT, **options)
    assert "BF16" in {tensor.dtype for layer in layout.layers for tensor in layer.tensors}
    assert (warm.stats.restored_tokens, again.stats.skip) == (48, "full")
    assert equal(cold, warm, "exact")
    assert equal(cold, again, "exact")


def test_a_class_that_only_concatenates(
    tiny: Path, store: Store, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model of mlx-lm 0.32 makes these caches itself, but a custom one may. They have no spare
    room, so that a hole is refilled in a copy."""
    from mlx_lm.models import llama
    from mlx_lm.models.cache import ConcatenateKVCache

    def make(self: Any) -> list[Any]:
        return [ConcatenateKVCache() for _ in self.layers]

    cold = run(make_engine(None, tiny, block_tokens=BLOCK), PROMPT)
    monkeypatch.setattr(llama.Model, "make_cache", make, raising=False)
    warm = make_engine(store, tiny, block_tokens=BLOCK)
    run(warm, PROMPT[:-1])
    namespace = warm.call(lambda worker: worker.storage.namespace)
    for holes in ((), (1,), (0, 2)):
        for hole in holes:
            make_hole(store, namespace, hole)
        again = run(warm, PROMPT)
        assert again.stats.refilled_tokens == len(holes) * BLOCK
        assert equal(cold, again, "max")
        assert run(warm, PROMPT).stats.skip == "full"
