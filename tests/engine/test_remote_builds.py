"""State that another build computed is compared with ours before it is used, however it came."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_model import equal, prompt_tokens, run, write_model
from zoo import write_species

import kvdb
from engine import lookup, mlxlm
from engine.remote import MAX_COMPARED
from kvdb.identity import as_tokens
from kvdb.remotes.configs import new_spec, save_spec
from kvdb.remotes.fetching import Fetching
from kvdb.store import Store
from kvdb.writer import Payload

pytestmark = pytest.mark.usefixtures("always_loads")

PROMPT = prompt_tokens(150)
BLOCK = 64
VERDICTS = "SELECT verdict FROM builds WHERE digest = 'another build'"


def retell(
    a: Store,
    other: Store,
    scale: float,
    prompt: list[int] = PROMPT,
    digest: str = "another build",
    first: int = 0,
) -> None:
    """Put what ``a`` has of a prompt from block ``first`` on into another store, as another build
    computed it: its state times ``scale``."""
    record = a.describe(a.namespaces()[0])
    namespace = other.namespace(record.identity, record.layout, block_tokens=record.block_tokens)
    build = other.build(namespace, digest, {})
    tokens = as_tokens(prompt)
    payloads = []
    for block in a.match(a.namespaces()[0], tokens).blocks[first:]:
        parts = {}
        for name, part in block.parts.items():
            raw = a.read_part(part)
            assert raw is not None
            if not record.layout.by_name[name].is_mark:
                raw = (raw.view(np.float32) * np.float32(scale)).view(np.uint8)
            parts[name] = raw
        payloads.append(Payload(block.index, parts))
    assert other.put(namespace, tokens, payloads, build_id=build.id).wait(30).dropped == 0


@pytest.mark.parametrize(
    ("how", "scale"),
    [
        ("remote", 1.0),
        ("remote", 1.5),
        ("remote to a device", 1.0),
        ("snapshot", 1.0),
        ("snapshot", 1.5),
    ],
)
def test_a_foreign_build_is_compared_once(
    tmp_path: Path, make_engine: Any, monkeypatch: pytest.MonkeyPatch, how: str, scale: float
) -> None:
    if how == "remote to a device":
        monkeypatch.setattr(lookup, "mlxlm", SimpleNamespace(host_memory=lambda: False))
    model = write_model(tmp_path / "model")
    team = tmp_path / "team"
    team.mkdir()
    with kvdb.open(tmp_path / "a", min_free_bytes=0) as a:
        engine = make_engine(a, model, block_tokens=BLOCK)
        cold = run(engine, PROMPT, max_tokens=12)
        other_prompt = [*PROMPT[:100], *prompt_tokens(60, 7)]
        cold_other = run(engine, other_prompt, max_tokens=12)
        for name in ("other", "b"):
            with kvdb.open(tmp_path / name, min_free_bytes=0) as store:
                save_spec(store, new_spec("team", team.as_uri(), budget_ms=2000))
        with kvdb.open(tmp_path / "other", min_free_bytes=0, remotes=how != "snapshot") as other:
            retell(a, other, scale)
            retell(a, other, scale, other_prompt)
            target = io.BytesIO()
            other.export_snapshot(target)
    with kvdb.open(tmp_path / "b", min_free_bytes=0, remotes=how != "snapshot") as b:
        engine = make_engine(b, model, block_tokens=BLOCK)
        run(engine, prompt_tokens(80, 3))  # so that our build is the one that its store is about
        if how == "snapshot":
            assert b.import_snapshot(io.BytesIO(target.getvalue())).stored > 0
        first = run(engine, PROMPT, max_tokens=12)
        good = scale == 1.0
        assert b.sql(VERDICTS).rows == [("compatible" if good else "incompatible",)]
        assert first.ids == cold.ids
        assert equal(cold, first, "max")
        assert (first.stats.restored_tokens > BLOCK) is good
        # No forward more than the comparison of one block, the first time only.
        again = run(engine, PROMPT, max_tokens=12)
        assert again.stats.skip == "full"
        assert again.ids == cold.ids
        later = run(engine, other_prompt, max_tokens=12)
        assert later.ids == cold_other.ids
        assert (later.stats.restored_tokens > 2 * BLOCK) is good
        assert b.verify(data=True).ok
        engine.close()


def test_a_read_only_store_compares_too(tmp_path: Path, make_engine: Any) -> None:
    model = write_model(tmp_path / "model")
    with kvdb.open(tmp_path / "a", min_free_bytes=0) as a:
        cold = run(make_engine(a, model, block_tokens=BLOCK), PROMPT, max_tokens=12)
        with kvdb.open(tmp_path / "other", min_free_bytes=0) as other:
            retell(a, other, 1.5)
            target = io.BytesIO()
            other.export_snapshot(target)
    with kvdb.open(tmp_path / "b", min_free_bytes=0) as b:
        engine = make_engine(b, model, block_tokens=BLOCK)
        run(engine, prompt_tokens(80, 3))
        b.import_snapshot(io.BytesIO(target.getvalue()))
        engine.close()
    with kvdb.open(tmp_path / "b", read_only=True) as b:
        engine = make_engine(b, model, block_tokens=BLOCK)
        for _ in range(2):
            got = run(engine, PROMPT, max_tokens=12, store=False)
            assert got.stats.restored_tokens == 0
            assert got.ids == cold.ids
        engine.close()


@pytest.mark.parametrize("how", ["here", "remote"])
@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_builds_that_found_nothing_to_compare_are_compared_later(
    tmp_path: Path, make_engine: Any, monkeypatch: pytest.MonkeyPatch, how: str, scale: float
) -> None:
    """Each of two builds met an empty namespace; only then the first one's state comes up."""
    model = write_model(tmp_path / "model")
    team = tmp_path / "team"
    team.mkdir()
    with kvdb.open(tmp_path / "a", min_free_bytes=0) as a:
        cold = run(make_engine(a, model, block_tokens=BLOCK), PROMPT, max_tokens=12)
        ((first,),) = a.sql("SELECT digest FROM builds").rows
        for name in ("other", "b"):
            with kvdb.open(tmp_path / name, min_free_bytes=0) as store:
                save_spec(store, new_spec("team", team.as_uri(), budget_ms=2000))
        if how == "remote":
            with kvdb.open(tmp_path / "other", min_free_bytes=0, remotes=True) as other:
                retell(a, other, scale, digest=first)
        with kvdb.open(tmp_path / "b", min_free_bytes=0, remotes=how == "remote") as b:
            running = make_engine(b, model, block_tokens=BLOCK)
            real = mlxlm.build_description
            monkeypatch.setattr(
                mlxlm, "build_description", lambda *args: {**real(*args), "mlx": "an upgrade"}
            )
            engine = make_engine(b, model, block_tokens=BLOCK)
            if how == "here":
                retell(a, b, scale, digest=first)
            got = run(engine, PROMPT, max_tokens=12)
            assert (got.stats.restored_tokens > BLOCK) is (scale == 1.0)
            assert equal(cold, got, "max")
            monkeypatch.undo()
            # The one that the namespace was about before compares itself, too.
            third = run(running, PROMPT, max_tokens=12)
            assert third.stats.skip == "full"
            assert equal(cold, third, "max")
            assert b.sql("SELECT verdict FROM builds").rows == [("compatible",)] * 2
            assert b.verify(data=True).ok


@pytest.mark.parametrize(("scale", "restores"), [(1.0, True), (1.5, False)])
def test_token_ids_prove_no_build(
    tmp_path: Path, make_engine: Any, scale: float, restores: bool
) -> None:
    """Blocks of a model without full attention hold token ids instead: equal in every build."""
    model = write_species(tmp_path / "model", "mamba2")
    team = tmp_path / "team"
    team.mkdir()
    with kvdb.open(tmp_path / "a", min_free_bytes=0) as a:
        engine = make_engine(a, model, block_tokens=BLOCK)
        cold = run(engine, PROMPT, max_tokens=12)
        run(engine, PROMPT[: 2 * BLOCK])  # a state at a block's end
        for name in ("other", "b"):
            with kvdb.open(tmp_path / name, min_free_bytes=0) as store:
                save_spec(store, new_spec("team", team.as_uri(), budget_ms=2000))
        with kvdb.open(tmp_path / "other", min_free_bytes=0, remotes=True) as other:
            retell(a, other, scale)
    with kvdb.open(tmp_path / "b", min_free_bytes=0, remotes=True) as b:
        engine = make_engine(b, model, block_tokens=BLOCK)
        run(engine, prompt_tokens(80, 3))
        for again in range(2):
            got = run(engine, PROMPT, max_tokens=12)
            assert equal(cold, got, "max")
            assert got.ids == cold.ids
            assert restores or got.stats.remote_tokens == 0
            assert again == 0 or got.stats.bytes_remote == 0
            assert (got.stats.restored_tokens > 0) is (restores or again > 0)
        assert b.sql(VERDICTS).rows == [("compatible" if restores else "incompatible",)]
        assert b.verify(data=True).ok


def test_a_remote_of_many_builds_is_soon_left(
    tmp_path: Path, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    team = tmp_path / "team"
    team.mkdir()
    count = 9
    with kvdb.open(tmp_path / "a", min_free_bytes=0) as a:
        cold = run(make_engine(a, model, block_tokens=16), PROMPT, max_tokens=4)
        for name in ("other", "b"):
            with kvdb.open(tmp_path / name, min_free_bytes=0) as store:
                save_spec(store, new_spec("team", team.as_uri(), budget_ms=2000))
        with kvdb.open(tmp_path / "other", min_free_bytes=0, remotes=True) as other:
            for block in range(count):
                prompt = PROMPT[: 16 * (block + 1)]
                retell(a, other, 1.5, prompt, digest=f"build {block}", first=block)
    rounds: list[int] = []
    get = Fetching.get
    monkeypatch.setattr(
        Fetching, "get", lambda self, wanted: rounds.append(len(wanted)) or get(self, wanted)
    )
    with kvdb.open(tmp_path / "b", min_free_bytes=0, remotes=True) as b:
        engine = make_engine(b, model, block_tokens=16)
        run(engine, prompt_tokens(80, 3))
        got = run(engine, PROMPT, max_tokens=4)
        assert got.stats.restored_tokens == 0
        assert equal(cold, got, "max")
        assert rounds[0] == count
        assert len(rounds) <= MAX_COMPARED + 1
