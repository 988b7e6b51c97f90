"""A remote that is slow, hangs, dies or lies costs its budget: the text is right all the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_model import Run, prompt_tokens, run, write_model

import kvdb
from engine import End, Engine, Request, Sampling, Token
from engine.builds import Speed
from kvdb.explain import explain_request
from kvdb.remotes.configs import new_spec, save_spec
from kvdb.remotes.peer import ASKING
from kvdb.remotes.registry import open_remote
from kvdb.remotes.remote import (
    Get,
    Got,
    Listed,
    Put,
    PutState,
    Remote,
    RemoteConfig,
    RemoteUnreachable,
)
from kvdb.remotes.tier import Tier

pytestmark = pytest.mark.usefixtures("always_loads")

PROMPT = prompt_tokens(300)
BLOCK = 32
BUDGET_MS = 100


class Faulty:
    """A remote that does what no server can be made to do at a given moment: ``asked`` is done
    before a question is answered, ``got`` before each object is handed out."""

    def __init__(
        self,
        inner: Remote,
        asked: Callable[[], None] = lambda: None,
        got: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._inner = inner
        self._asked = asked
        self._got = got
        self._count = 0
        self.questions = 0

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        self.questions += 1
        self._asked()
        return self._inner.exists_many(keys)

    def get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        for got in self._inner.get_many(gets):
            self._count += 1
            self._got(self._count)
            yield got

    def put_many(self, puts: Sequence[Put]) -> list[PutState]:
        return self._inner.put_many(puts)

    def list(self, prefix: str) -> Iterator[Listed]:
        return self._inner.list(prefix)

    def close(self) -> None:
        self._inner.close()


class World:
    """A folder that has a prompt's state, and a machine that reads it through some fault."""

    def __init__(self, folder: Path, make_engine: Any) -> None:
        self.folder = folder
        self.model = write_model(folder / "model")
        self._make_engine = make_engine
        team = folder / "team"
        team.mkdir()
        self.url = team.as_uri()
        with kvdb.open(folder / "a", min_free_bytes=0) as a:
            save_spec(a, new_spec("team", self.url))
        with kvdb.open(folder / "a", min_free_bytes=0, remotes=True) as a:
            engine = make_engine(a, self.model, block_tokens=BLOCK)
            self.cold = run(engine, PROMPT, max_tokens=8)
            assert a.remotes is not None
            assert a.remotes.flush(10)
            engine.close()
        self.store = kvdb.open(folder / "b", min_free_bytes=0)
        self.spec = save_spec(self.store, new_spec("team", self.url, budget_ms=BUDGET_MS))

    def ask(self, faulty: Callable[[Remote], Remote] = lambda inner: inner) -> Run:
        """The prompt on the machine that reads, with text checked."""
        if self.store.remotes is None:
            inner = open_remote(RemoteConfig("team", self.url))
            self.store.remotes = Tier(
                self.store, [(self.spec, lambda: faulty(inner))], idle_seconds=0.2
            )
            self.engine = self._make_engine(self.store, self.model, block_tokens=BLOCK)
            run(self.engine, prompt_tokens(20, 4), max_tokens=1, read=False)  # warm
        got = run(self.engine, PROMPT, max_tokens=8)
        assert got.ids == self.cold.ids
        return got

    def row(self) -> dict[str, Any]:
        result = self.store.sql("SELECT * FROM requests ORDER BY id DESC LIMIT 1")
        return dict(zip(result.columns, result.rows[0], strict=True))

    def counts(self) -> dict[str, Any]:
        assert self.store.flush(10)
        result = self.store.sql("SELECT * FROM remotes")
        return dict(zip(result.columns, result.rows[0], strict=True))


def run_to_end(engine: Engine, **options: Any) -> End:
    events = list(engine.generate(Request(tokens=PROMPT, max_tokens=4, **options)))
    assert isinstance(events[-1], End)
    return events[-1]


@pytest.fixture
def world(tmp_path: Path, make_engine: Any) -> Iterator[World]:
    made = World(tmp_path, make_engine)
    yield made
    made.store.close()


def test_a_remote_that_dies_in_the_middle(world: World) -> None:
    def die(count: int) -> None:
        if count > 4:
            raise RemoteUnreachable("The connection was cut.")

    got = world.ask(lambda inner: Faulty(inner, got=die))
    assert 0 < got.stats.remote_tokens < len(PROMPT)
    assert got.stats.computed_tokens + got.stats.refilled_tokens > BLOCK
    told, counts = world.row(), world.counts()
    assert told["remote_decision"] == "failed"
    assert counts["last_error"] == "The connection was cut."
    assert counts["down_until"] > counts["last_error_at"]
    assert world.store.verify(data=True).ok


def test_a_remote_that_hangs_in_the_middle(world: World) -> None:
    release = threading.Event()

    def hang(count: int) -> None:
        if count > 4:
            release.wait(30)

    began = time.monotonic()
    got = world.ask(lambda inner: Faulty(inner, got=hang))
    assert time.monotonic() - began < 10
    assert got.stats.remote_tokens < len(PROMPT)
    assert world.row()["remote_decision"] == "failed"
    release.set()  # what comes now is thrown away
    assert world.ask().stats.skip == "full"


def test_a_request_that_ends_while_it_fetches(world: World) -> None:
    release = threading.Event()
    with kvdb.open(world.folder / "c", min_free_bytes=0) as store:
        inner = open_remote(RemoteConfig("team", world.url))
        hanging = Faulty(inner, got=lambda count: release.wait(30) and None)
        store.remotes = Tier(store, [(world.spec, lambda: hanging)], idle_seconds=20)
        engine = world._make_engine(store, world.model, block_tokens=BLOCK)
        ended = run_to_end(engine, deadline_ms=400)
        assert ended.reason == "deadline"
        assert ended.stats.total_ms < 5000
        release.set()
        assert run_to_end(engine).reason == "length"
        engine.close()


def test_a_question_that_hangs_costs_its_budget(world: World) -> None:
    release = threading.Event()
    faulty: list[Faulty] = []

    def wrap(inner: Remote) -> Faulty:
        faulty.append(Faulty(inner, asked=lambda: release.wait(30) and None))
        return faulty[0]

    got = world.ask(wrap)
    assert got.stats.skip == "none"
    told = world.row()
    assert told["remote_decision"] == "late"
    assert BUDGET_MS <= told["remote_ms"] <= BUDGET_MS + 100
    assert world.counts()["late"] == 1
    for number in range(4):  # others' prompts
        run(world.engine, prompt_tokens(100, 20 + number), max_tokens=1)
    assert world.row()["remote_decision"] == "down"
    asking = [thread for thread in threading.enumerate() if thread.name == "kvdb-ask-team"]
    assert len(asking) <= ASKING
    assert faulty[0].questions <= 3
    release.set()


def test_loading_that_is_slower_than_computing_is_left_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speed, "seconds_per_token", 1e-3)
    with world.store.database.write() as connection:
        connection.execute("UPDATE remotes SET round_trip_ms = 1, bytes_per_second = 2000")
    got = world.ask()
    assert (got.stats.skip, got.stats.bytes_remote) == ("none", 0)
    told = world.row()
    assert (told["remote"], told["remote_decision"]) == ("team", "recomputed")
    assert told["load_estimate_ms"] > told["compute_estimate_ms"] == pytest.approx(len(PROMPT))
    words = explain_request(world.store, told["id"]).lines()
    assert any(line.startswith("Remote: team has more of it") for line in words)
    history = "SELECT remote, remote_decision, remote_tokens FROM hit_history WHERE id = ?"
    assert world.store.sql(history, (told["id"],)).rows == [("team", "recomputed", 0)]


def test_a_read_only_store_uses_what_it_cannot_keep(world: World, make_engine: Any) -> None:
    run(make_engine(world.store, world.model, block_tokens=BLOCK), prompt_tokens(40, 3))
    with kvdb.open(world.folder / "b", read_only=True, remotes=True) as store:
        engine = make_engine(store, world.model, block_tokens=BLOCK)
        for _ in range(2):
            got = run(engine, PROMPT, max_tokens=8, store=False)
            assert got.ids == world.cold.ids
            assert (got.stats.skip, got.stats.remote_tokens) == ("full", len(PROMPT))
        engine.close()


def test_others_decode_while_one_fetches(world: World) -> None:
    """The MLX thread never waits for a network."""
    fetching, release = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        fetching.set()
        release.wait(0.15)

    inner = open_remote(RemoteConfig("team", world.url))
    world.store.remotes = Tier(
        world.store, [(world.spec, lambda: Faulty(inner, got=hold))], idle_seconds=5
    )
    engine = world._make_engine(world.store, world.model, block_tokens=BLOCK)
    answers: list[Run] = []
    other = threading.Thread(target=lambda: answers.append(run(engine, PROMPT, max_tokens=8)))
    request = Request(
        tokens=prompt_tokens(20, 9), max_tokens=400, sampling=Sampling(seed=1), ignore_eos=True
    )
    during = 0
    events = engine.generate(request)
    next(events)
    other.start()
    for event in events:
        during += isinstance(event, Token) and fetching.is_set() and not release.is_set()
        if during == 20:
            release.set()
    other.join(20)
    assert during >= 20
    assert answers[0].ids == world.cold.ids


def test_a_folder_that_is_gone(
    tmp_path: Path, tiny: Path, make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with kvdb.open(tmp_path / "a", min_free_bytes=0) as a:
        save_spec(a, new_spec("team", (tmp_path / "gone").as_uri()))
    with kvdb.open(tmp_path / "a", min_free_bytes=0, remotes=True) as a:
        engine = make_engine(a, tiny, block_tokens=BLOCK)
        assert run(engine, PROMPT, max_tokens=2).stats.computed_tokens > 0
        assert a.flush(10)
        assert a.sql("SELECT remote_decision IN ('failed', 'down') FROM requests").rows == [(1,)]
        engine.close()
