"""What one machine computed, another restores from a remote that both use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_model import Run, difference, equal, prompt_tokens, run, write_model
from zoo import write_species

import kvdb
from engine import Request, Sampling, Token
from kvdb.remotes.configs import new_spec, save_spec
from kvdb.remotes.tier import Tier
from kvdb.store import Store

pytestmark = pytest.mark.usefixtures("always_loads")

PROMPT = prompt_tokens(150)
Machine = Callable[..., Store]


@pytest.fixture
def team(tmp_path: Path) -> Path:
    folder = tmp_path / "team"
    folder.mkdir()
    return folder


@pytest.fixture
def machine(tmp_path: Path, team: Path) -> Iterator[Machine]:
    """Stores of machines that share the folder ``team``."""
    made: list[Store] = []

    def make(name: str, **options: Any) -> Store:
        path = tmp_path / name
        with kvdb.open(path, min_free_bytes=0) as store:
            if not store.sql("SELECT 1 FROM remotes").rows:
                save_spec(store, new_spec("team", team.as_uri(), budget_ms=2000))
        if options.get("read_only"):
            made.append(kvdb.open(path, remotes=True, **options))
        else:
            made.append(kvdb.open(path, min_free_bytes=0, remotes=True, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


def tier_of(store: Store) -> Tier:
    assert store.remotes is not None
    return store.remotes


def shared(store: Store) -> None:
    """All that was stored reaches the remotes."""
    assert store.flush(10)
    assert tier_of(store).flush(10)


def row(store: Store) -> dict[str, Any]:
    """The newest row of history."""
    assert store.flush(10)
    result = store.sql("SELECT * FROM requests ORDER BY id DESC LIMIT 1")
    return dict(zip(result.columns, result.rows[0], strict=True))


@pytest.mark.parametrize("reuse", ["max", "exact"])
def test_what_one_computed_another_restores(
    tmp_path: Path, machine: Machine, make_engine: Any, reuse: str
) -> None:
    model = write_model(tmp_path / "model")
    here, there = machine("a"), machine("b")
    cold = run(make_engine(here, model, block_tokens=64), PROMPT, reuse=reuse, max_tokens=12)
    shared(here)
    engine = make_engine(there, model, block_tokens=64)
    first = run(engine, PROMPT, reuse=reuse, max_tokens=12)
    assert (first.stats.skip, first.stats.computed_tokens) == ("full", 0)
    assert first.ids == cold.ids
    assert equal(cold, first, reuse)
    told = row(there)
    assert (told["remote"], told["remote_decision"]) == ("team", "loaded")
    assert told["remote_tokens"] == len(PROMPT) == told["restored_tokens"]
    assert told["bytes_remote"] == first.stats.bytes_remote > 0
    assert (told["unstored"], told["miss_reason"]) == (None, None)
    # What came is stored here now, with where it came from: the remote is asked no more.
    again = run(engine, PROMPT, reuse=reuse, max_tokens=12)
    assert again.stats.skip == "full"
    assert again.stats.bytes_remote == 0
    assert row(there)["remote_decision"] is None
    origins = there.sql("SELECT DISTINCT origin FROM blocks WHERE depth < 2").rows
    assert origins == [("import",)]
    assert there.verify(data=True).ok


def test_exact_mode_takes_no_chain_that_is_not_exact(
    tmp_path: Path, machine: Machine, make_engine: Any
) -> None:
    """One object tells, and others may still have the rest."""
    model = write_model(tmp_path / "model")
    here, there = machine("a"), machine("b")
    prompt = prompt_tokens(1200)
    engine = make_engine(here, model, block_tokens=16)
    cold = run(engine, prompt, reuse="exact", store=False, max_tokens=8)
    run(engine, prompt, max_tokens=8)
    shared(here)
    engine = make_engine(there, model, block_tokens=16)
    exact = run(engine, prompt, reuse="exact", store=False, max_tokens=8)
    assert equal(cold, exact, "exact")
    assert exact.stats.restored_tokens == 0
    assert row(there)["remote_decision"] == "failed"
    assert run(engine, prompt).stats.remote_tokens == len(prompt)


@pytest.mark.parametrize("species", ["qwen3_next", "gemma3_text", "llama, 8-bit KV"])
def test_states_windows_and_logits_are_fetched_as_a_plan_needs_them(
    tmp_path: Path, machine: Machine, make_engine: Any, species: str
) -> None:
    options = {"kv_bits": 8, "kv_group_size": 32} if "8-bit" in species else {}
    model = write_species(tmp_path / "model", species)
    here, there = machine("a"), machine("b")
    prompts = [PROMPT, [*PROMPT[:128], *prompt_tokens(30, 5)]]
    engine = make_engine(here, model, block_tokens=32, **options)
    run(engine, PROMPT)
    run(engine, PROMPT[:128])  # a state at a block's end
    shared(here)
    results: list[list[Run]] = []
    for each in (here, there):
        engine = make_engine(each, model, block_tokens=32, **options)
        results.append([run(engine, prompt, max_tokens=8, store=False) for prompt in prompts])
    for local, remote in zip(*results, strict=True):
        assert remote.stats.skip == local.stats.skip
        assert remote.stats.restored_tokens == local.stats.restored_tokens > 0
        assert remote.stats.remote_tokens == remote.stats.restored_tokens
        assert equal(local, remote, "max")
    # What is kept of them serves the next one.
    assert run(engine, PROMPT).stats.bytes_remote > 0
    again = run(engine, PROMPT)
    assert (again.stats.skip, again.stats.bytes_remote) == ("full", 0)


def objects(team: Path) -> list[Path]:
    """Blocks' objects in the folder, parents first."""
    return sorted((f for f in team.rglob("*-*")), key=lambda file: file.name)


def damage(file: Path, how: str, other: Path) -> None:
    data = bytearray(file.read_bytes())
    if how == "flipped":
        data[len(data) * 2 // 3] ^= 1
    elif how == "truncated":
        data = data[:-100]
    elif how == "another block":
        data = bytearray(other.read_bytes())
    elif how == "too large":
        data += bytes(1 << 20)
    else:
        data = bytearray(b"not a block at all")
    file.chmod(0o600)
    file.write_bytes(data)


def test_wrong_objects_are_computed_and_replaced(
    tmp_path: Path, team: Path, machine: Machine, make_engine: Any
) -> None:
    model = write_model(tmp_path / "model")
    here, there = machine("a"), machine("b")
    prompt = prompt_tokens(300)
    cold = run(make_engine(here, model, block_tokens=32), prompt, max_tokens=12)
    shared(here)
    bodies = [file for file in objects(team) if file.suffix == ""]
    wrong = {2: "flipped", 4: "truncated", 5: "another block", 7: "too large", 8: "foreign"}
    for index, how in wrong.items():
        damage(bodies[index], how, bodies[1])
    first = run(make_engine(there, model, block_tokens=32), prompt, max_tokens=12)
    assert first.ids == cold.ids
    assert difference(first.logits, cold.logits) <= 1e-4
    assert first.stats.refilled_tokens == 32 * len(wrong)
    assert first.stats.remote_tokens == len(prompt) - 32 * len(wrong)
    assert row(there)["remote_decision"] == "failed"
    assert tier_of(there).peer("team").counters.totals["rejected"] == len(wrong)
    # Whoever computed it puts the right one in its place.
    shared(there)
    assert there.verify(data=True).ok
    third = run(make_engine(machine("c"), model, block_tokens=32), prompt, max_tokens=12)
    assert (third.stats.skip, third.stats.remote_tokens) == ("full", len(prompt))
    assert third.ids == cold.ids


def test_a_device_is_filled_by_way_of_the_store(
    tmp_path: Path, machine: Machine, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the host's memory is not the device's: only the look-up is told so here."""
    from engine import lookup

    model = write_model(tmp_path / "model")
    here, there = machine("a"), machine("b")
    cold = run(make_engine(here, model, block_tokens=32), PROMPT, max_tokens=12)
    shared(here)
    monkeypatch.setattr(lookup, "mlxlm", SimpleNamespace(host_memory=lambda: False))
    engine = make_engine(there, model, block_tokens=32)
    first = run(engine, PROMPT, max_tokens=12)
    assert (first.stats.skip, first.stats.remote_tokens) == ("full", len(PROMPT))
    assert first.stats.bytes_remote > 0
    assert first.stats.bytes_read > 0
    assert first.ids == cold.ids


def test_a_hole_is_filled_from_a_remote(tmp_path: Path, machine: Machine, make_engine: Any) -> None:
    model = write_model(tmp_path / "model")
    here = machine("a")
    engine = make_engine(here, model, block_tokens=32)
    cold = run(engine, PROMPT, max_tokens=12)
    shared(here)
    with here.database.write() as connection:
        holes = [
            id_ for (id_,) in connection.execute("SELECT id FROM blocks WHERE depth IN (1, 2)")
        ]
        for block_id in holes:
            connection.execute("DELETE FROM parts WHERE block_id = ?", (block_id,))
            connection.execute("UPDATE blocks SET state = 'evicted' WHERE id = ?", (block_id,))
    warm = run(engine, PROMPT, max_tokens=12)
    assert (warm.stats.skip, warm.stats.remote_tokens) == ("full", 64)
    assert warm.ids == cold.ids
    assert run(engine, PROMPT, max_tokens=12).stats.bytes_remote == 0


def test_several_requests_at_once_and_a_longer_prompt(
    tmp_path: Path, machine: Machine, make_engine: Any
) -> None:
    model = write_model(tmp_path / "model")
    here, there = machine("a"), machine("b")
    longer = [*PROMPT, *prompt_tokens(60, 5)]
    cold = [
        run(make_engine(here, model, block_tokens=32), prompt, max_tokens=8)
        for prompt in (PROMPT, longer)
    ]
    shared(here)
    engine = make_engine(there, model, block_tokens=32)
    answers: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        prompt = (PROMPT, longer)[number % 2]
        events = engine.generate(Request(tokens=prompt, max_tokens=8, sampling=Sampling(seed=7)))
        answers[number] = [event.id for event in events if isinstance(event, Token)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[number] for number in range(6)] == [cold[n % 2].ids for n in range(6)]
    assert there.flush(10)
    assert there.verify(data=True).ok
    assert there.sql("SELECT sum(remote_tokens) > 0, count(unstored) FROM requests").rows == [
        (1, 0)
    ]
