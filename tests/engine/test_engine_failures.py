"""What ends one request ends that one only: clients that go, deadlines, failing models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from many import ask_all, ends, flush, held, ids, settle
from tiny_model import prompt_tokens, run

from engine import End, Engine, Event, Progress, Request, Sampling, Token
from engine.logits import Row
from engine.turns import Cancelled, Forward, StateLost
from kvdb.store import Store

BAD = 99
NEVER, ALWAYS = Sampling(logit_bias={BAD: -99.0}), Sampling(logit_bias={BAD: 99.0})


class Failing:
    """A model that lacks memory whenever it meets one token."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, tokens: Any, cache: Any) -> Any:
        if BAD in tokens.reshape(-1).tolist():
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return self._model(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def break_model(worker: Any) -> None:
    worker.model.model = Failing(worker.model.model)


def outcomes(engine: Engine, requests: Sequence[Request]) -> list[list[Event] | Exception]:
    """Events of requests that arrive together, or what each raised."""
    streams: list[Any] = []
    engine.call(lambda worker: streams.extend(engine.generate(r) for r in requests))

    def drain(stream: Any) -> list[Event] | Exception:
        try:
            return list(stream)
        except RuntimeError as error:
            return error

    return [drain(stream) for stream in streams]


def without_bad(length: int, seed: int) -> list[int]:
    return [1 if token == BAD else token for token in prompt_tokens(length, seed)]


def test_a_prompt_that_fails_fails_alone(tiny: Path, store: Store, make_engine: Any) -> None:
    engine = make_engine(store, tiny, block_tokens=64, step=64)
    good = Request(
        tokens=without_bad(300, 1), max_tokens=9, sampling=Sampling(logit_bias={BAD: -99})
    )
    alone = ids(list(engine.generate(replace(good, read=False, store=False))))
    engine.call(break_model)
    bad = Request(tokens=[*without_bad(200, 2), BAD], max_tokens=9)
    first, failed, second = outcomes(engine, [good, bad, replace(good, reuse="exact")])
    assert isinstance(failed, RuntimeError)
    assert ids(first) == ids(second) == alone  # type: ignore[arg-type]
    flush(engine)
    assert held(store) == 0
    # What it had computed was stored.
    assert run(engine, [*without_bad(200, 2), 5]).stats.restored_tokens >= 192


def test_a_token_that_fails_fails_alone(tiny: Path, store: Store, make_engine: Any) -> None:
    engine = make_engine(store, tiny, block_tokens=16)
    sampling = replace(NEVER, repetition_penalty=1.3, temperature=1.0, seed=1)
    good = [
        Request(tokens=without_bad(n, n), max_tokens=40, ignore_eos=True, sampling=sampling)
        for n in (30, 100, 120)
    ]
    alone = [ids(list(engine.generate(replace(r, read=False, store=False)))) for r in good]
    engine.call(break_model)
    # It chooses the bad token as its first, and fails where that goes through the model.
    bad = Request(
        tokens=without_bad(90, 9), max_tokens=40, sampling=Sampling(logit_bias={BAD: 99.0})
    )
    *answers, failed = outcomes(engine, [*good, bad])
    assert isinstance(failed, RuntimeError)
    assert [ids(events) for events in answers] == alone  # type: ignore[arg-type]
    assert ends(answers[0])[0].stats.alone == "a forward with others failed"  # type: ignore[arg-type]
    flush(engine)
    assert held(store) == 0
    assert run(engine, [*without_bad(30, 30), *alone[0][:39]]).stats.restored_tokens >= 68


def test_cancelled_while_its_lost_state_is_computed_anew(
    tiny: Path, store: Store, make_engine: Any
) -> None:
    """Nothing is stored of a state that is not there."""
    engine = make_engine(store, tiny, block_tokens=16, step=64)
    prompt = prompt_tokens(700, 1)

    def lose_and_cancel(worker: Any) -> None:
        coroutine = worker.take(Request(tokens=prompt, max_tokens=40)).events()
        item = next(coroutine)
        for _ in range(3):
            while not isinstance(item, Forward):
                item = next(coroutine)
            logits = worker.model(item.token[None], item.seat.caches)[:, -1, :]
            item.seat.length += 1
            item = coroutine.send(Row.alone(logits))
        assert isinstance(item, Token)
        forward = next(coroutine)
        forward.seat.lose()
        coroutine.throw(StateLost("on purpose"))
        assert 0 < forward.seat.caches[0].offset < 700  # some of it is there again
        assert isinstance(coroutine.throw(Cancelled("cancelled")), End)

    engine.call(lose_and_cancel)
    flush(engine)
    assert held(store) == 0
    assert store.sql("SELECT count(*) FROM blocks WHERE origin = 'decode'").rows == [(0,)]
    assert run(engine, prompt).stats.skip == "full"


def test_a_deadline_ends_a_request_wherever_it_is(
    tiny: Path, store: Store, make_engine: Any
) -> None:
    engine = make_engine(store, tiny, block_tokens=64, step=64, max_running=1)
    long = Request(tokens=prompt_tokens(4000, 1), max_tokens=50, deadline_ms=100, n=3)
    late = Request(tokens=prompt_tokens(50, 2), max_tokens=5, deadline_ms=0.01, n=2)
    talk = Request(tokens=[1, 2], max_tokens=3900, ignore_eos=True, deadline_ms=700)
    answers = ask_all(engine, [long, late, talk])
    assert [[end.reason for end in ends(events)] for events in answers] == [
        ["deadline"] * 3,
        ["deadline"] * 2,
        ["deadline"],
    ]
    assert 0 < len(ids(answers[2])) < 3900
    flush(engine)
    assert held(store) == 0
    done = [e.done for e in answers[0] if isinstance(e, Progress)][-1]
    assert run(engine, prompt_tokens(4000, 1)).stats.restored_tokens >= done // 64 * 64


def test_clients_that_go_leave_nothing_behind(tiny: Path, store: Store, make_engine: Any) -> None:
    engine = make_engine(store, tiny, block_tokens=64, step=64)
    beside = engine.generate(Request(tokens=[3, 4, 5], max_tokens=200, ignore_eos=True))
    for number in range(60):
        request = Request(tokens=prompt_tokens(500, number % 7), max_tokens=40, n=1 + number % 3)
        stream = engine.generate(request)
        for _ in range(number % 12):
            next(stream, None)
        stream.close()  # type: ignore[attr-defined]
    alone = list(engine.generate(Request(tokens=[3, 4, 5], max_tokens=200, ignore_eos=True)))
    assert ids(list(beside)) == ids(alone)
    settle(engine)
    assert held(store) == 0


HALF = """
import json, sys
import kvdb
from engine import Engine, EngineOptions, Request
tokens, most, streams = json.loads(sys.argv[3]), int(sys.argv[4]), []

class Watched:
    def __init__(self, worker):
        self.worker, self.model = worker, worker.model.model

    def __call__(self, *arguments, **options):
        if self.worker.model.forwarded >= most:
            streams[0].close()  # between two steps, wherever the engine is
        return self.model(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self.model, name)

def begin(worker):
    worker.model.model = Watched(worker)
    streams.append(engine.generate(Request(tokens=tokens, max_tokens=2)))

with kvdb.open(sys.argv[1], min_free_bytes=0) as store:
    with Engine(store, sys.argv[2], options=EngineOptions(block_tokens=64, step=128)) as engine:
        engine.call(begin)
        list(streams[0])
        print(engine.call(lambda worker: worker.model.forwarded))
"""


def test_a_retry_in_another_process_computes_the_other_half(tiny: Path, tmp_path: Path) -> None:
    """A prefill of 9 steps, cancelled after half of them."""
    tokens = prompt_tokens(1150)

    def attempt(most: int) -> int:
        arguments = [str(tmp_path / "store"), str(tiny), json.dumps(tokens), str(most)]
        done = subprocess.run(
            [sys.executable, "-c", HALF, *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return int(done.stdout)

    assert attempt(5 * 128) == 5 * 128
    assert 0 < attempt(5000) == 1150 - 5 * 128 + 1 <= 1150 // 2 + 128
