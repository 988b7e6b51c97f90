"""Identity follows content: swapped weights, adapters, names, files that change while read."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_model import CONFIG, equal, prompt_tokens, run, write_adapter, write_model

from engine.fingerprint import MEMORY_FILE, DigestMemory, model_identity
from kvdb.store import Store

PROMPT = prompt_tokens(150)


def test_weights_swapped_under_one_name_miss(
    tmp_path: Path, store: Store, make_engine: Any
) -> None:
    folder = write_model(tmp_path / "model", seed=0)
    run(make_engine(store, folder), PROMPT)
    shutil.rmtree(folder)
    write_model(folder, seed=1)
    swapped = run(make_engine(store, folder), PROMPT)
    assert swapped.stats.restored_tokens == 0
    assert equal(run(make_engine(None, folder), PROMPT), swapped, "max")


def test_a_config_override_is_another_model(tiny: Path, store: Store, make_engine: Any) -> None:
    run(make_engine(store, tiny), PROMPT)
    other = make_engine(store, tiny, config={"rope_theta": 20000.0})
    assert run(other, PROMPT).stats.restored_tokens == 0


def test_a_moved_model_keeps_its_cache(tmp_path: Path, store: Store, make_engine: Any) -> None:
    folder = write_model(tmp_path / "here")
    run(make_engine(store, folder), PROMPT)
    moved = folder.rename(tmp_path / "there")
    (moved / "model.safetensors").rename(moved / "model-00001-of-00001.safetensors")
    assert run(make_engine(store, moved), PROMPT).stats.skip == "full"


def test_adapters_do_not_share_state(
    tmp_path: Path, tiny: Path, store: Store, make_engine: Any
) -> None:
    a = write_adapter(tmp_path / "a", seed=1)
    b = write_adapter(tmp_path / "b", seed=2)
    skips = [
        run(make_engine(store, tiny, **options), PROMPT).stats.skip
        for options in ({}, {"adapter": a}, {"adapter": b}, {"adapter": a})
    ]
    assert skips == ["none", "none", "none", "full"]
    with_a = run(make_engine(store, tiny, adapter=a), PROMPT)
    assert equal(run(make_engine(None, tiny, adapter=a), PROMPT), with_a, "max")
    assert not equal(run(make_engine(None, tiny), PROMPT), with_a, "max")
    # Another adapter under the same name.
    shutil.rmtree(a)
    write_adapter(a, seed=3)
    assert run(make_engine(store, tiny, adapter=a), PROMPT).stats.skip == "none"


def test_salts_and_block_sizes_keep_apart(tiny: Path, store: Store, make_engine: Any) -> None:
    for options in ({}, {"salt": b"x"}, {"block_tokens": 64}):
        engine = make_engine(store, tiny, **options)
        assert run(engine, PROMPT).stats.restored_tokens == 0
        assert run(engine, PROMPT).stats.skip == "full"


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


class CountingMemory(DigestMemory):
    """Knows how many digests it has learned."""

    @property
    def known(self) -> int:
        return len(self._known)


def test_digests_are_remembered_until_a_file_changes(tmp_path: Path) -> None:
    path, cache = tmp_path / "weights", tmp_path / "cache"
    path.write_bytes(b"one")
    first = CountingMemory(cache)
    digest = first.digest(path)
    assert first.known == 0  # changed within the last two seconds
    first.save()
    assert not (cache / MEMORY_FILE).exists()

    def later() -> float:
        return time.time() + 10

    second = CountingMemory(cache, now=later)
    assert second.digest(path) == digest
    second.save()
    third = CountingMemory(cache, now=later)
    assert third.known == 1
    path.write_bytes(b"two")
    changed = third.digest(path)
    assert changed != digest
    third.save()
    assert CountingMemory(cache, now=later).digest(path) == changed


def test_a_damaged_memory_is_only_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    plain = DigestMemory(tmp_path / "none").digest(path)
    for text in ("", "[]", '{"a": 1}', "\0"):
        (tmp_path / MEMORY_FILE).write_text(text)
        assert DigestMemory(tmp_path).digest(path) == plain


def test_an_unwritable_cache_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    memory = DigestMemory(tmp_path / "file" / "cache", now=lambda: time.time() + 10)
    assert len(memory.digest(path)) == 64
    memory.save()


def test_roles_keep_apart(tmp_path: Path) -> None:
    """The same bytes as weights, config or code are different identities."""
    folder = write_model(tmp_path / "model")
    memory = DigestMemory(tmp_path / "cache")
    plain = model_identity(folder, CONFIG, memory)
    (folder / "hf_quant_config.json").write_text("{}")
    quantised = model_identity(folder, CONFIG, memory)
    overridden = model_identity(folder, CONFIG, memory, overrides={"rope_theta": 1.0})
    (folder / "code.py").write_text("")
    coded = model_identity(folder, {**CONFIG, "model_file": "code.py"}, memory)
    assert len({each.to_json() for each in (plain, quantised, overridden, coded)}) == 4


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_every_file_counts(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "model")
    memory = DigestMemory(tmp_path / "cache")
    before = model_identity(folder, CONFIG, memory)
    path = folder / name
    path.write_bytes(path.read_bytes() + b" ")
    assert model_identity(folder, CONFIG, memory) != before
