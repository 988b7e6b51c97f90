"""A crowd: 200 requests, 8 at once, of mixed urgency and length, a fifth of them cancelled."""

from __future__ import annotations

import gc
import random
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from many import ends, held, settle
from tiny_model import prompt_tokens

from engine import Engine, Event, Load, Request, Sampling
from engine.memory import held_bytes
from kvdb.reader import MAX_OPEN_SHARDS
from kvdb.store import Store


def crowd(count: int, seed: int, *, ranked: bool) -> list[Request]:
    """One in seven is interactive and short. Not ``ranked``, all are served as they come."""
    dice = random.Random(seed)
    requests = []
    for number in range(count):
        urgent = dice.random() < 0.15
        length = dice.randint(5, 100) if urgent else dice.randint(5, 500)
        requests.append(
            Request(
                tokens=prompt_tokens(length, seed=dice.randint(0, count // 2)),
                max_tokens=dice.randint(3, 15) if urgent else dice.randint(3, 25),
                ignore_eos=True,
                sampling=Sampling(temperature=dice.choice([0.0, 1.0]), seed=number),
                priority="interactive" if urgent or not ranked else "batch",
                client="urgent" if urgent else "",
                n=2 if dice.random() < 0.05 else 1,
            )
        )
    return requests


@dataclass(frozen=True)
class Outcome:
    """Milliseconds to the first token of those that were urgent; what went wrong."""

    first_ms: list[float]
    finished: int
    errors: list[BaseException]

    @property
    def p95(self) -> float:
        return float(np.percentile(self.first_ms, 95))


def serve(engine: Engine, requests: list[Request], seed: int) -> Outcome:
    """Hand all in at once, go away from a fifth of them after some events, await the others."""
    dice = random.Random(seed)
    streams: list[Any] = []
    engine.call(lambda worker: streams.extend(engine.generate(request) for request in requests))
    gone = set(dice.sample(range(len(requests)), len(requests) // 5))
    first_ms: list[float] = []
    errors: list[BaseException] = []
    finished: list[int] = []

    def leave(number: int, after: int) -> None:
        for _ in range(after):
            next(streams[number], None)
        streams[number].close()

    def stay(number: int) -> None:
        try:
            events: list[Event] = list(streams[number])
        except Exception as error:
            errors.append(error)
            return
        answers = ends(events)
        if len(answers) != requests[number].n or any(end.reason != "length" for end in answers):
            errors.append(AssertionError(f"request {number} ended as {answers}"))
        if requests[number].client == "urgent":
            first_ms.append(min(end.stats.first_token_ms or 0.0 for end in answers))
        finished.append(number)

    threads = [threading.Thread(target=leave, args=(n, dice.randint(0, 8))) for n in gone]
    threads += [threading.Thread(target=stay, args=(n,)) for n in set(range(len(streams))) - gone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settle(engine)
    return Outcome(first_ms, len(finished), errors)


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def check_crowd(engine: Engine, store: Store, count: int) -> None:
    serve(engine, crowd(count // 4, 1, ranked=True), 1)  # buffers, threads and files that stay
    engine.call(lambda worker: gc.collect())
    files, memory = open_files(), held_bytes()
    ranked = serve(engine, crowd(count, 2, ranked=True), 2)
    engine.call(lambda worker: gc.collect())
    grown = held_bytes() - memory
    as_it_comes = serve(engine, [replace(r, salt=b"2") for r in crowd(count, 2, ranked=False)], 2)
    print(
        f"\nfirst token of urgent requests, p95: {ranked.p95:.0f} ms, as they come "
        f"{as_it_comes.p95:.0f} ms; memory {grown >> 20} MiB more"
    )
    for outcome in (ranked, as_it_comes):
        assert outcome.errors == []
        assert outcome.finished == count - count // 5
    assert ranked.p95 < as_it_comes.p95 / 3
    assert open_files() <= files + MAX_OPEN_SHARDS
    assert grown < 100 << 20
    assert engine.load() == Load()
    assert held(store) == 0
    assert not store.verify().problems


def test_a_crowd(tiny: Path, store: Store, make_engine: Any) -> None:
    check_crowd(make_engine(store, tiny, block_tokens=64, step=128), store, 200)


@pytest.mark.torture
def test_a_crowd_for_hours(tiny: Path, store: Store, make_engine: Any) -> None:
    engine = make_engine(store, tiny, block_tokens=64, step=128, max_waiting=5000)
    check_crowd(engine, store, 5000)
