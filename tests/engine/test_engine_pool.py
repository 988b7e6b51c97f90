"""The model pool: models come and go, requests get an answer or a clean error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import VOCABULARY, prompt_tokens, write_model

from engine import EngineClosed, Request
from engine.events import End
from engine.memory import held_bytes
from engine.options import EngineOptions
from engine.pool import ModelBusy, Pool, PooledModel, PoolOptions
from kvdb.errors import ModelError, OutOfMemory
from kvdb.store import Store

PROMPT = prompt_tokens(100)
SMALL = PooledModel(engine_options=EngineOptions(block_tokens=64))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("pool")
    return [str(write_model(root / f"m{seed}", seed=seed, tokenizer=False)) for seed in range(3)]


@pytest.fixture
def make_pool(store: Store) -> Iterator[Any]:
    pools: list[Pool] = []

    def make(seconds: Any = None, **options: Any) -> Pool:
        options.setdefault("default", SMALL)
        extra = {} if seconds is None else {"seconds": seconds}
        pools.append(Pool(store, PoolOptions(**options), **extra))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def ask(pool: Pool, model: str) -> list[int]:
    events = list(pool.generate(model, Request(tokens=PROMPT, max_tokens=6)))
    assert isinstance(events[-1], End)
    return [event.id for event in events if hasattr(event, "id")]


def names(pool: Pool) -> list[str]:
    return [state.name for state in pool.loaded()]


def test_the_least_lately_used_goes_and_a_pinned_one_stays(
    models: list[str], make_pool: Any
) -> None:
    clock = Clock()
    a, b, c = models
    settings = {a: PooledModel(SMALL.model_options, SMALL.engine_options, ttl_seconds=60)}
    pool = make_pool(clock, max_models=2, models=settings)
    for model in (a, b, a, c):
        clock.now += 10
        ask(pool, model)
    assert names(pool) == [a, c]
    pool.pin(a)
    clock.now += 10
    ask(pool, b)
    assert names(pool) == [a, b]
    clock.now += 100
    pool.expire()
    assert names(pool) == [a, b]
    pool.pin(a, False)
    clock.now += 59
    pool.expire()
    assert a in names(pool)
    clock.now += 1
    pool.expire()  # its TTL, which b does not have
    assert names(pool) == [b]


def test_a_model_at_work_is_not_unloaded(models: list[str], make_pool: Any) -> None:
    pool = make_pool(max_models=1, wait_seconds=0.05)
    events = pool.generate(models[0], Request(tokens=PROMPT, max_tokens=50))
    next(events)
    assert not pool.unload(models[0])
    with pytest.raises(ModelBusy):
        ask(pool, models[1])
    events.close()
    ask(pool, models[1])
    with pytest.raises(ModelError):
        ask(pool, "/no/such/model")
    assert [state.users for state in pool.loaded()] == [0]
    with pytest.raises(OutOfMemory):
        ask(make_pool(max_bytes=1000), models[0])
    with pytest.raises(OutOfMemory):
        ask(make_pool(max_memory=1000), models[0])
    pool.close()
    with pytest.raises(EngineClosed):
        ask(pool, models[1])


def test_a_model_stays_until_the_last_of_several_answers(models: list[str], make_pool: Any) -> None:
    pool = make_pool()
    request = Request(tokens=PROMPT, max_tokens=20, ignore_eos=True, n=3)
    events = pool.generate(models[0], request)
    for answers_left in (2, 1):
        while not isinstance(next(events), End):
            pass
        assert not pool.unload(models[0]), f"{answers_left} answers are under way"
    assert sum(isinstance(event, End) for event in events) == 1
    assert pool.unload(models[0])


def test_an_idle_model_goes_before_a_request_is_refused(tmp_path: Path, make_pool: Any) -> None:
    wide = {"vocab_size": VOCABULARY * 512, "hidden_size": 128, "head_dim": 64}
    big = str(write_model(tmp_path / "big", tokenizer=False, **wide))
    long = str(write_model(tmp_path / "long", tokenizer=False, max_position_embeddings=1 << 20))
    pool = make_pool(max_memory=1 << 40)
    ask(pool, long)  # the code of all models
    ask(pool, big)
    with pool.engine(long) as engine:
        each = engine.call(lambda worker: worker.state_bytes(1000)) // 1000
    request = Request(tokens=PROMPT, max_tokens=(24 << 20) // each, ignore_eos=True)
    pool.guard.settle()
    pool.guard.ceiling = held_bytes() + (10 << 20)
    pool.pin(big)
    with pytest.raises(OutOfMemory):
        next(pool.generate(long, request))
    pool.pin(big, False)
    events = pool.generate(long, request)
    next(events)
    assert names(pool) == [long]
    events.close()
    assert len(ask(pool, long)) == 6


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_met_a_defect_is_replaced(models: list[str], make_pool: Any) -> None:
    pool = make_pool()
    answer = ask(pool, models[0])
    with pool.engine(models[0]) as engine:
        engine.call(lambda worker: delattr(worker, "guard"))
    with pytest.raises((AttributeError, EngineClosed)):
        ask(pool, models[0])
    assert engine.closed
    assert ask(pool, models[0]) == answer


def test_requests_in_a_loop_while_models_come_and_go(models: list[str], make_pool: Any) -> None:
    """omlx#2116: each request is answered as if it were alone, or refused in a sentence."""
    truth = {}
    with Pool(None, PoolOptions(default=SMALL)) as alone:
        truth = {model: ask(alone, model) for model in models}
    pool = make_pool(max_models=2)
    answered: list[bool] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def loop(first: int) -> None:
        for number in range(8):
            model = models[(first + number) % 3]
            try:
                answered.append(ask(pool, model) == truth[model])
            except (ModelBusy, EngineClosed):
                pass
            except BaseException as error:
                failed.append(error)

    def unload() -> None:
        while not done.wait(0.02):
            for model in models:
                pool.unload(model)

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(3)]
    disturber = threading.Thread(target=unload)
    for thread in (*threads, disturber):
        thread.start()
    for thread in threads:
        thread.join(120)
    done.set()
    disturber.join(10)
    assert not failed
    assert answered == [True] * 24


def test_memory_comes_back_when_a_model_goes(tmp_path: Path, make_pool: Any) -> None:
    """omlx#1459. 32 MiB of weights: the first time also loads code, so the second is measured."""
    big = str(
        write_model(
            tmp_path / "big",
            tokenizer=False,
            vocab_size=VOCABULARY * 512,
            hidden_size=128,
            head_dim=64,
        )
    )
    pool = make_pool(max_memory=1 << 40)
    for _ in range(2):
        pool.guard.settle()
        before = held_bytes()
        ask(pool, big)
        loaded = held_bytes()
        assert pool.unload(big)
        after = held_bytes()
    assert loaded - before > 25 << 20
    assert after - before < 8 << 20
