"""A build that meets stored state for the first time proves itself on one block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_model import equal, prompt_tokens, run, write_model

from engine import mlxlm
from kvdb.store import Store

PROMPT = prompt_tokens(200)


@pytest.fixture
def another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade: other code, which computes the same."""
    real = mlxlm.build_description
    monkeypatch.setattr(
        mlxlm, "build_description", lambda *args: {**real(*args), "mlx": "an upgrade"}
    )


def builds(store: Store) -> list[tuple[Any, ...]]:
    return store.sql(
        "SELECT n.build IS NULL, b.verdict FROM builds AS b JOIN namespaces AS n "
        "ON n.id = b.namespace_id ORDER BY b.id"
    ).rows


@pytest.mark.parametrize("options", [{}, {"kv_bits": 8, "kv_group_size": 32}, {"dtype": "BF16"}])
def test_a_compatible_build_goes_on_with_what_is_stored(
    tmp_path: Path,
    store: Store,
    make_engine: Any,
    request: pytest.FixtureRequest,
    options: dict[str, Any],
) -> None:
    options = dict(options)
    model = write_model(tmp_path / "model", dtype=options.pop("dtype", "F32"))
    first = run(make_engine(store, model, block_tokens=64, **options), PROMPT)
    request.getfixturevalue("another_build")
    for _ in range(2):
        warm = run(make_engine(store, model, block_tokens=64, **options), PROMPT)
        assert warm.stats.skip == "full"
        assert equal(first, warm, "max")
    assert builds(store) == [(1, "compatible"), (1, "compatible")]
    ((difference,),) = store.sql("SELECT difference FROM builds WHERE difference IS NOT NULL").rows
    assert 0 <= difference < 0.1  # in units of the tolerance


def test_exact_mode_reuses_its_own_build_only(
    tiny: Path, store: Store, make_engine: Any, request: pytest.FixtureRequest
) -> None:
    run(make_engine(store, tiny, block_tokens=64), PROMPT, reuse="exact")
    request.getfixturevalue("another_build")
    engine = make_engine(store, tiny, block_tokens=64)
    assert run(engine, PROMPT, reuse="exact").stats.restored_tokens == 0
    assert run(engine, PROMPT, reuse="exact").stats.skip == "full"


@pytest.mark.parametrize("bits", [None, 8])
def test_an_incompatible_build_gets_a_namespace_of_its_own(
    tiny: Path, store: Store, make_engine: Any, request: pytest.FixtureRequest, bits: int | None
) -> None:
    options = {"kv_bits": bits, "kv_group_size": 32}
    first = run(make_engine(store, tiny, block_tokens=64, **options), PROMPT)
    request.getfixturevalue("another_build")
    real = mlxlm.CountingModel.__call__

    def shifted(self: Any, tokens: Any, cache: Any) -> Any:
        """The same model, counting positions from 1: an upgrade that changed the rope."""
        if cache[0].offset == 0 and tokens.shape[1] > 1:
            real(self, tokens[:, :1], cache)
            for each in cache:
                each.offset = 1
            logits = real(self, tokens, cache)
            for each in cache:
                move_back(each)
            return logits
        return real(self, tokens, cache)

    def move_back(cache: Any) -> None:
        def cut(array: Any) -> Any:
            return array[:, :, 1 : cache.offset]

        if isinstance(cache.keys, tuple):
            cache.keys = tuple(cut(array) for array in cache.keys)
            cache.values = tuple(cut(array) for array in cache.values)
        else:
            cache.keys, cache.values = cut(cache.keys), cut(cache.values)
        cache.offset -= 1

    monkeypatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setattr(mlxlm.CountingModel, "__call__", shifted)
    other = make_engine(store, tiny, block_tokens=64, **options)
    monkeypatch.setattr(mlxlm.CountingModel, "__call__", real)
    assert run(other, PROMPT).stats.restored_tokens == 0
    assert builds(store) == [(1, "compatible"), (1, "incompatible"), (0, "compatible")]
    again = make_engine(store, tiny, block_tokens=64, **options)
    assert run(again, PROMPT).stats.skip == "full"
    monkeypatch.undo()
    old = run(make_engine(store, tiny, block_tokens=64, **options), PROMPT)
    assert old.stats.skip == "full"
    assert equal(first, old, "max")


def test_the_check_walks_to_a_block_whose_root_is_gone(
    tiny: Path, store: Store, make_engine: Any, request: pytest.FixtureRequest
) -> None:
    from kvdb.shards import shard_path

    run(make_engine(store, tiny, block_tokens=64), PROMPT, max_tokens=1)
    rows = store.sql(
        "SELECT s.uuid, p.offset, p.nbytes FROM parts AS p JOIN shards AS s ON s.id = p.shard_id "
        "JOIN blocks AS b ON b.id = p.block_id WHERE b.depth = 0 AND p.part = 'kv:0'"
    ).rows
    for uuid, offset, nbytes in rows:
        path = shard_path(store.path, uuid)
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"\xff" * nbytes)
    request.getfixturevalue("another_build")
    warm = run(make_engine(store, tiny, block_tokens=64), PROMPT)
    assert warm.stats.refilled_tokens == 64
    assert builds(store)[1] == (1, "compatible")


def test_a_description_names_code_versions_and_device(tiny: Path, make_engine: Any) -> None:
    description = make_engine(None, tiny).call(lambda worker: worker.description)
    assert set(description) == {
        "code",
        "mlx",
        "device",
        "hardware",
        "blas",
        "blas_version",
        "blas_core",
        "blas_threads",
    }
    assert len(description["code"]) == 64
