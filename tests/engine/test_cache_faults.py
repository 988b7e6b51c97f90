"""Faults that users of other caches reported, of kinds B and C: each test is named after its kind
(see cases/README.md of the project)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cache_table import BLOCK, PROMPT, diverging, open_engine, other
from many import cancel_when, settle
from tiny_model import Run, equal, prompt_tokens, run
from zoo import SPECIES, WINDOW, write_species

import kvdb
from engine import Engine, Request
from engine.storage import Storage
from kvdb.explain import explain_request, explain_tokens
from kvdb.reader import Damaged
from kvdb.store import Store

LONG = prompt_tokens(200, seed=3)
SHORT: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}


@pytest.fixture(autouse=True, scope="module")
def _no_compiler() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


class Models(dict[str, Path]):
    """Folders of species, each written when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, species: str) -> Path:
        self[species] = write_species(self._folder / str(len(self)), species)
        return self[species]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("zoo"))


def cold(models: Models, species: str, tokens: list[int], **options: Any) -> Run:
    with open_engine(None, models[species], species) as engine:
        return run(engine, tokens, **{**SHORT, **options})


@pytest.mark.parametrize("species", ["gemma3_text", "gpt_oss", "llama4"])
def test_trim_past_a_sliding_window(models: Models, store: Store, species: str) -> None:
    """A prompt ten windows long, then one that diverges in its first quarter: what the window
    dropped long ago is on the disk."""
    changed = [*LONG[:45], *other(LONG, 60)]
    with open_engine(store, models[species], species) as engine:
        run(engine, LONG, **SHORT)
        warm = run(engine, changed, **SHORT)
    assert len(LONG) > 4 * WINDOW
    assert warm.stats.restored_tokens == 45
    assert warm.stats.miss_reason == "diverged"
    assert equal(cold(models, species, changed), warm, "max")


def test_mixed_shapes_in_one_chain(models: Models, store: Store) -> None:
    """A row that claims another length than its layout gives: the chain is used without it."""
    with open_engine(store, models["gemma3_text"], "gemma3_text") as engine:
        run(engine, PROMPT, **SHORT)
        with store.database.write() as connection:
            for depth, part in ((1, "kv:0"), (3, "kv:1")):
                connection.execute(
                    "UPDATE parts SET nbytes = nbytes / 2, raw_nbytes = raw_nbytes / 2 "
                    "WHERE part = ? AND block_id = (SELECT id FROM blocks WHERE depth = ?)",
                    (part, depth),
                )
        warm = run(engine, PROMPT, **SHORT)
    assert warm.stats.refilled_tokens > 0
    assert equal(cold(models, "gemma3_text", PROMPT), warm, "max")


@pytest.mark.parametrize("species", SPECIES)
def test_buffer_tail_stored_as_state(models: Models, store: Store, species: str) -> None:
    """Buffers are longer than their state: prompts of 1 and 3 tokens and of a block ± 1, each
    asked twice, then continued."""
    limit = 1e-3 if SPECIES[species].options else 1e-4
    with open_engine(store, models[species], species) as engine:
        for length in (1, 3, BLOCK - 1, BLOCK, BLOCK + 1):
            tokens = prompt_tokens(length, seed=length)
            first, again = (run(engine, tokens, **SHORT) for _ in range(2))
            assert again.stats.skip == "full"
            assert np.abs(first.logits - again.logits).max() <= limit * np.abs(first.logits).max()
            longer = [*tokens, *first.ids[:-1], *prompt_tokens(5, seed=9)]
            warm = run(engine, longer, **SHORT)
            assert warm.stats.restored_tokens == length + 3
            reference = cold(models, species, longer)
            apart = np.abs(reference.logits - warm.logits).max() / np.abs(reference.logits).max()
            assert apart <= limit, length


@pytest.mark.parametrize("species", ["llama", "gemma3_text", "qwen3_next", "llama4"])
def test_wrong_position_after_partial_reuse(models: Models, store: Store, species: str) -> None:
    """Four blocks stored, two of them used, with another tail."""
    stored, changed = LONG[: 4 * BLOCK], [*LONG[: 2 * BLOCK], *other(LONG, 2 * BLOCK + 3)]
    with open_engine(store, models[species], species) as engine:
        run(engine, stored, boundaries=(2 * BLOCK,), **SHORT)
        warm = run(engine, changed, **SHORT)
    assert warm.stats.restored_tokens == 2 * BLOCK
    assert equal(cold(models, species, changed), warm, "max")


def test_kv_quantisation_not_in_the_key(models: Models, store: Store) -> None:
    """None, 4 and 8 bits on one store: three key spaces, none of them sees another's state."""
    from engine import EngineOptions, ModelOptions

    model = models["llama, 8-bit KV"]
    for bits in (None, 4, 8):
        options = ModelOptions(kv_bits=bits, kv_group_size=32)
        with Engine(
            store, str(model), model_options=options, options=EngineOptions(BLOCK)
        ) as engine:
            assert run(engine, PROMPT, **SHORT).stats.restored_tokens == 0
            assert run(engine, PROMPT, **SHORT).stats.skip == "full"
    assert len(store.namespaces()) == 3


@pytest.mark.parametrize("species", ["qwen3_next", "falcon_h1 (CacheList)", "recurrent_gemma"])
def test_incomplete_hybrid_snapshot(models: Models, store: Store, species: str) -> None:
    """Attention without the recurrent state of the same token is no state: with the states gone,
    nothing is restored, and nothing is wrong."""
    with open_engine(store, models[species], species) as engine:
        run(engine, PROMPT, **SHORT)
        store.flush()
        with store.database.write() as connection:
            connection.execute("DELETE FROM parts WHERE part LIKE 'state:%'")
        before = explain_tokens(store, store.namespaces()[-1], PROMPT)
        warm = run(engine, PROMPT, **SHORT)
        store.flush()
        for why in (before, explain_request(store, 2)):
            assert (why.code, why.hit_tokens, why.differing_token) == ("no_boundary", 0, 0)
            assert len(PROMPT) - BLOCK < why.saving_tokens <= len(PROMPT)
        assert warm.stats.restored_tokens == 0
        assert warm.stats.miss_reason == "no_boundary"
        assert equal(cold(models, species, PROMPT), warm, "max")
        again = run(engine, PROMPT, **SHORT)
        assert again.stats.skip == "full"


@pytest.mark.parametrize("species", ["gemma3_text", "qwen3_next", "mamba2"])
def test_aborted_prefill_discarded(models: Models, store: Store, species: str) -> None:
    """Cancelled in mid-prefill: a retry goes on where it was cut short, recurrent layers too."""
    with open_engine(store, models[species], species) as engine:
        events = engine.generate(Request(tokens=LONG, **SHORT))
        for event in events:
            if getattr(event, "done", 0) >= 100:
                events.close()  # type: ignore[attr-defined]
        settle(engine)
        warm = run(engine, LONG, **SHORT)
    assert warm.stats.restored_tokens >= 96
    assert warm.stats.restored_tokens % BLOCK == 0
    assert equal(cold(models, species, LONG), warm, "max")


def test_cancelled_between_a_refill_and_the_rest(models: Models, store: Store) -> None:
    """The caches have jumped on from where refilling ended: their state is not that place's."""
    species = "falcon_h1 (CacheList)"
    with open_engine(store, models[species], species) as engine:
        run(engine, LONG[:70], boundaries=(2 * BLOCK, 4 * BLOCK), **SHORT)
        namespace = engine.call(lambda worker: worker.storage.namespace)
        block = store.match(namespace, LONG[:70]).blocks[1]
        location = store.locate([block.id])[block.id, "kv:1"]
        store.report_damage(location, Damaged("on purpose"))

        def cancel_after_the_refill(worker: Any) -> int:
            began = worker.model.forwarded
            request = Request(tokens=LONG, **SHORT)
            cancel_when(worker.take(request).events(), lambda: worker.model.forwarded > began)
            return int(worker.model.forwarded - began)

        assert engine.call(cancel_after_the_refill) == 2 * BLOCK
        engine.call(lambda worker: store.flush())
        for tokens in (LONG, [*LONG[:40], *PROMPT]):  # the second has 32 to go on from
            warm = run(engine, tokens, **SHORT)
            assert equal(cold(models, species, tokens), warm, "max")


@pytest.mark.parametrize("part", ["kv:0", "kv:1", "state"])
def test_wrong_output_after_a_rejected_load(models: Models, store: Store, part: str) -> None:
    """A window's part, a block's attention or a state cannot be read after all: another plan is
    made, which may need what the first one did not, and the answer is right."""
    species = "qwen3_next" if part == "state" else "gemma3_text"

    class Refusing(Storage):
        """Loses one part once."""

        refused = 0

        def read(self, match: Any, wants: Any) -> Any:
            result = super().read(match, wants)
            for want in wants:
                if want.part.startswith(part) and want.blocks and not self.refused:
                    self.refused += 1
                    lost = frozenset({(want.blocks[-1], want.part)})
                    return type(result)(lost, result.shared_ok, result.nbytes)
            return result

    with open_engine(store, models[species], species) as engine:
        run(engine, PROMPT, boundaries=(2 * BLOCK,), **SHORT)
        refusing = engine.call(
            lambda w: Refusing(w.storage.store, w.storage.namespace, w.storage.build)
        )
        engine.call(lambda worker: setattr(worker, "storage", refusing))
        warm = run(engine, PROMPT, **SHORT)
    assert refusing.refused == 1
    assert warm.stats.miss_reason == "damaged"
    assert 0 < warm.stats.restored_tokens < len(PROMPT)
    reference = cold(models, species, PROMPT)
    assert equal(reference, warm, "max")


def test_stored_entry_changes_later(models: Models, store: Store) -> None:
    """What was put stays what it was while the request goes on over it, window and state too."""
    digests = "SELECT block_id, part, hex(checksum) FROM parts ORDER BY 1, 2"
    for species in ("gemma3_text", "qwen3_next"):
        with open_engine(store, models[species], species) as engine:
            run(engine, LONG[:90], max_tokens=1)
            before = store.sql(digests, limit=10_000).rows
            run(engine, LONG[:90], max_tokens=120, ignore_eos=True)
            after = store.sql(digests, limit=10_000).rows
            assert set(before) <= set(after)
            assert store.verify(data=True).ok
            for tokens in (diverging(60, 80), [*LONG[:90], *PROMPT]):
                assert equal(cold(models, species, tokens), run(engine, tokens, **SHORT), "max")


def test_index_can_be_lost(models: Models, tmp_path: Path) -> None:
    """Shards describe windows and states too: after a rebuild they are restored as before."""
    path = tmp_path / "store"
    before = {}
    for species in ("gemma3_text", "qwen3_next", "mamba2"):
        with kvdb.open(path) as store, open_engine(store, models[species], species) as engine:
            run(engine, PROMPT, boundaries=(40,), **SHORT)
            before[species] = run(engine, diverging(50), store=False, **SHORT)
    (path / "index.sqlite").unlink()
    kvdb.rebuild(path)
    for species, reference in before.items():
        with kvdb.open(path) as store, open_engine(store, models[species], species) as engine:
            assert store.verify(data=True).ok
            again = run(engine, diverging(50), store=False, **SHORT)
            assert again.stats.restored_tokens == reference.stats.restored_tokens > 0
            assert np.array_equal(again.logits, reference.logits)


def test_template_instability(tmp_path: Path, store: Store, models: Models) -> None:
    """The next turn repeats the messages and leaves out what was generated: a recurrent model goes
    on from the end of the last message, though nobody told it where that is."""
    from tiny_model import write_tokenizer

    folder = write_species(tmp_path / "chat", "qwen3_next")
    write_tokenizer(folder)
    asked = {"role": "user", "content": "What is the capital of France? " * 3}
    follow = {"role": "user", "content": "And of Italy?"}
    with open_engine(store, folder, "qwen3_next") as engine:
        run(engine, messages=[asked], **SHORT)
        warm = run(engine, messages=[asked, follow], **SHORT)
    assert warm.stats.restored_tokens == len(f"user: {asked['content']}\n")
    with open_engine(None, folder, "qwen3_next") as engine:
        assert equal(run(engine, messages=[asked, follow], **SHORT), warm, "max")
