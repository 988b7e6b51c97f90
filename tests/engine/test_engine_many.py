"""Many requests at once: the same answers as alone, in the right order, each computed once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from many import ask_all, ends, flush, forwarded, held, ids, requests_of, watch
from tiny_model import difference, prompt_tokens, run
from zoo import SPECIES, write_species

from engine import (
    Event,
    Load,
    Progress,
    Request,
    Sampling,
    TenantLimits,
    Token,
)
from engine.order import Order
from kvdb.errors import Busy, QuotaExceeded
from kvdb.store import Store

LENGTHS = (3, 20, 90, 300, 31, 700, 64, 1)


def logprobs(events: Sequence[Event]) -> np.ndarray[Any, np.dtype[np.float32]]:
    tops = [dict(e.top_logprobs) for e in events if isinstance(e, Token)]
    return np.array([[row[i] for i in sorted(row)] for row in tops], np.float32)


@pytest.fixture
def _no_compiler() -> Iterator[None]:
    """mx.compile calls the C++ compiler for every new kernel."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("species", SPECIES)
def test_answers_together_equal_answers_alone(
    tmp_path: Path, store: Store, make_engine: Any, species: str
) -> None:
    """So does what is stored of them while they are rows of a batch."""
    model, options = write_species(tmp_path / "model", species), SPECIES[species].options
    cold = make_engine(None, model, block_tokens=16, **options)
    engine = make_engine(store, model, block_tokens=16, **options)
    requests = requests_of((3, 90, 50), max_tokens=45, logprobs=128)
    together = ask_all(engine, requests)
    flush(engine)
    limit = 1e-3 if options else 1e-4  # a value near a border of the quantiser may fall beyond it
    longer = [[*(r.tokens or ()), *ids(e)[:44], 5] for r, e in zip(requests, together, strict=True)]
    again = [run(cold, tokens, ignore_eos=True) for tokens in longer]
    for number, request in enumerate(requests):
        alone = list(cold.generate(request))
        assert difference(logprobs(alone), logprobs(together[number])) <= limit
        restored = run(engine, longer[number], ignore_eos=True)
        assert restored.stats.restored_tokens == len(longer[number]) - 1
        assert difference(again[number].logits, restored.logits) <= limit
        # The twin: another row's state is noticed.
        assert difference(again[number - 1].logits, restored.logits) > 10 * limit
        stats = ends(together[number])[0].stats
        if species == "llama4":
            assert (stats.shared_steps, stats.alone) == (0, "ChunkedKVCache has no batch form")
        else:
            assert (stats.shared_steps > 30, stats.alone) == (True, None)


def test_equal_seeds_give_equal_tokens_alone_and_beside_others(
    tiny: Path, make_engine: Any
) -> None:
    engine = make_engine(None, tiny)
    requests = [
        replace(request, sampling=Sampling(temperature=1.0, seed=number % 3))
        for number, request in enumerate(requests_of(LENGTHS, max_tokens=30))
    ]
    alone = [ids(list(engine.generate(request))) for request in requests]
    assert [ids(events) for events in ask_all(engine, requests)] == alone
    assert [ids(events) for events in ask_all(engine, requests[::-1])] == alone[::-1]


def test_exact_requests_decode_alone(tiny: Path, make_engine: Any) -> None:
    engine = make_engine(None, tiny, block_tokens=64)
    requests = requests_of((100, 120), max_tokens=20, logprobs=128)
    exact = [replace(request, reuse="exact") for request in requests]
    alone = [list(engine.generate(request)) for request in exact]
    together = ask_all(engine, [*exact, *requests])
    for one, other in zip(alone, together, strict=False):
        assert np.array_equal(logprobs(one), logprobs(other))
        assert ends(other)[0].stats.alone == "exact mode"
        assert ends(other)[0].stats.shared_steps == 0


def test_several_answers_share_one_prefill(tiny: Path, store: Store, make_engine: Any) -> None:
    engine = make_engine(store, tiny, block_tokens=64)
    prompt = prompt_tokens(300)
    sampling = Sampling(temperature=1.0, seed=4)
    one = Request(tokens=prompt, max_tokens=40, ignore_eos=True, sampling=sampling, read=False)
    before = engine.call(forwarded)
    events = list(engine.generate(replace(one, read=True, n=4)))
    assert engine.call(forwarded) - before == 300 + 4 * 39
    answers = [ids(events, index) for index in range(4)]
    assert sorted(end.index for end in ends(events)) == [0, 1, 2, 3]
    assert answers[0] == ids(list(engine.generate(one)))
    assert len({tuple(answer) for answer in answers}) == 4
    # Each is stored as its own, over one stored prompt.
    flush(engine)
    for answer in answers:
        assert run(engine, [*prompt, *answer[:39]]).stats.restored_tokens >= 338
    assert store.sql("SELECT count(*) FROM blocks WHERE depth = 0").rows == [(1,)]
    assert held(store) == 0
    # From stored logits, and with no second token, it is the same.
    again = list(engine.generate(replace(one, read=True, n=4)))
    assert [ids(again, index) for index in range(4)] == answers
    first = list(engine.generate(replace(one, read=True, n=4, max_tokens=1)))
    assert [ids(first, index) for index in range(4)] == [answer[:1] for answer in answers]


@pytest.mark.parametrize("stored", [True, False])
def test_identical_prompts_are_computed_once(
    tiny: Path, store: Store, make_engine: Any, stored: bool
) -> None:
    engine = make_engine(store if stored else None, tiny, block_tokens=64)
    prompt = prompt_tokens(700)
    requests = [Request(tokens=prompt, max_tokens=n, ignore_eos=True) for n in (5, 9, 7)]
    requests[2] = replace(requests[2], n=2)
    answers = ask_all(engine, requests)
    assert engine.call(forwarded) == 700 + 4 + 8 + 6 + 6
    cold = ids(list(engine.generate(replace(requests[1], read=False, store=False))))
    assert [ids(events) for events in answers] == [cold[:5], cold, cold[:7]]
    assert ids(answers[2], 1) == cold[:7]
    skips = [[end.stats.skip for end in ends(events)] for events in answers]
    assert skips == [["none"], ["full"], ["full", "full"]]


def test_a_shared_beginning_is_computed_once(tiny: Path, store: Store, make_engine: Any) -> None:
    engine = make_engine(store, tiny, block_tokens=64, step=64)
    system = prompt_tokens(600, seed=9)
    requests = [
        Request(tokens=[*system, *prompt_tokens(100, seed=n)], max_tokens=2) for n in range(4)
    ]
    stats = [ends(events)[0].stats for events in ask_all(engine, requests)]
    assert stats[0].restored_tokens == 0
    assert all(576 <= s.restored_tokens <= 600 for s in stats[1:])


def test_an_urgent_request_waits_for_a_beginning_that_is_being_computed(
    tiny: Path, store: Store, make_engine: Any
) -> None:
    """It lends its urgency to the one that computes it, and goes on from there."""
    engine = make_engine(store, tiny, block_tokens=64, step=64)
    system = prompt_tokens(1500, seed=9)
    slow = engine.generate(
        Request(tokens=[*system, *prompt_tokens(1500, 1)], max_tokens=2, priority="batch")
    )
    next(e for e in slow if isinstance(e, Progress) and e.done >= 192)
    urgent = run(engine, [*system, *prompt_tokens(30, 2)], max_tokens=2)
    assert urgent.stats.restored_tokens >= 1472
    ended = list(slow)
    assert sum(isinstance(event, Progress) for event in ended) > 10  # it was first
    assert engine.call(forwarded) <= 3000 + 30 + 64 + 2


def test_a_long_prompt_gives_way_and_keeps_its_work(
    tiny: Path, store: Store, make_engine: Any
) -> None:
    engine = make_engine(store, tiny, block_tokens=64, step=64, max_running=1)
    order: list[str] = []
    long = Request(tokens=prompt_tokens(3000, seed=1), max_tokens=2, priority="batch")
    stream = engine.generate(long)
    for event in stream:
        if isinstance(event, Progress) and event.done >= 192:
            break
    before = engine.load()
    short = list(engine.generate(Request(tokens=prompt_tokens(20, seed=2), max_tokens=2)))
    order = [type(event).__name__ for event in stream]
    assert (before.running, before.prefilling) == (1, 1)
    # The long one was not done when the short one ended, and began nothing anew.
    assert order.count("Progress") > 10
    assert ends(short)[0].stats.first_token_ms < 1e3
    assert engine.call(forwarded) == 3000 + 20 + 2


def test_a_paused_answer_goes_on_where_it_was(tiny: Path, make_engine: Any) -> None:
    engine = make_engine(None, tiny, max_running=2)
    batch = requests_of((300, 40), max_tokens=200, priority="batch")
    alone = [ids(list(engine.generate(request))) for request in batch]
    streams = [engine.generate(request) for request in batch]
    begun = [[next(e for e in stream if isinstance(e, Token))] for stream in streams]
    urgent = ask_all(engine, requests_of((20, 21, 22), max_tokens=20))
    paused = [one + list(rest) for one, rest in zip(begun, streams, strict=True)]
    assert [ids(events) for events in paused] == alone
    assert all(len(ids(events)) == 20 for events in urgent)
    engine.call(lambda worker: None)
    assert engine.load() == Load()


def test_one_that_waits_to_be_held_can_be_paused(
    tiny: Path, store: Store, make_engine: Any
) -> None:
    """It has left the batch that it was a row of, which goes on without it."""
    engine = make_engine(store, tiny, block_tokens=64, max_running=2)
    on_disk = threading.Event()
    slow, kept = requests_of((40, 50), max_tokens=120, priority="batch")

    def stall(worker: Any) -> None:
        written = worker.storage.written
        worker.storage.written = lambda tokens: (
            on_disk.is_set if len(tokens) in range(51, 60) else written(tokens)
        )

    engine.call(stall)
    streams: list[Any] = []
    asked = (slow, replace(kept, max_tokens=5, ttl_seconds=60))
    engine.call(lambda worker: streams.extend(engine.generate(r) for r in asked))
    tokens = [next(e for e in streams[1] if isinstance(e, Token)) for _ in range(5)]
    before = [next(e for e in streams[0] if isinstance(e, Token)) for _ in range(20)]
    urgent = list(engine.generate(Request(tokens=[1, 2, 3], max_tokens=3)))
    store.flush()
    on_disk.set()
    ended = [list(stream) for stream in streams]
    assert ends(urgent)[0].reason == "length"
    assert ends(ended[1])[0].stats.held
    alone = make_engine(None, tiny)
    for events, request in ((before + ended[0], slow), (tokens + ended[1], kept)):
        answer = ids(list(alone.generate(request)))
        assert ids(events) == answer[: len(ids(events))]
    assert len(ids(before + ended[0])) == 120


def test_a_tenant_has_no_more_than_its_limits(tiny: Path, make_engine: Any) -> None:
    limits = {"a": TenantLimits(requests=1), "b": TenantLimits(tokens=100)}
    engine = make_engine(None, tiny, tenants=limits)
    for tenant, allowed in (("a", 1), ("b", 2), ("", 4)):
        running: list[int] = []
        watch(engine, lambda logits, seen=running: seen.append(engine.load().running))
        requests = requests_of((30, 31, 32, 33), max_tokens=15, tenant=tenant)
        assert all(len(ids(events)) == 15 for events in ask_all(engine, requests))
        assert max(running) == allowed
    with pytest.raises(QuotaExceeded, match="101 tokens"):
        next(engine.generate(Request(tokens=[1], max_tokens=100, tenant="b")))


def test_what_would_wait_beyond_the_queue_is_refused(tiny: Path, make_engine: Any) -> None:
    engine = make_engine(None, tiny, max_running=2, max_waiting=3)
    requests = requests_of([20] * 8, max_tokens=4, n=2)
    streams: list[Any] = []
    engine.call(lambda worker: streams.extend(engine.generate(r) for r in requests))
    outcomes: list[str] = []
    for stream in streams:
        try:
            outcomes.append(f"{len(ends(list(stream)))} answers")
        except Busy as busy:
            outcomes.append(f"again in {busy.retry_seconds:.0f} s")
    assert outcomes == ["2 answers"] * 5 + ["again in 1 s"] * 3
    assert len(ask_all(engine, requests[:5])) == 5  # there is room again


def test_who_waits_costs_those_at_work_nothing(
    tiny: Path, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all places are taken, nobody looks for who is next: not at each token."""
    engine = make_engine(None, tiny, max_running=1, max_waiting=100)
    sorted_ = 0
    sort = Order.sort

    def counted(self: Order, waiting: Iterable[Any]) -> list[Any]:
        nonlocal sorted_
        sorted_ += 1
        return sort(self, waiting)

    monkeypatch.setattr(Order, "sort", counted)
    for priority in ("interactive", "batch"):
        request = Request(tokens=prompt_tokens(30), max_tokens=90, ignore_eos=True)
        working = engine.generate(replace(request, priority=priority))
        next(event for event in working if isinstance(event, Token))
        batch = replace(request, priority="batch", max_tokens=1)
        waiting = [engine.generate(batch) for _ in range(20)]
        for _ in range(30):
            next(working)
        before = sorted_
        for _ in range(30):
            next(working)
        assert sorted_ == before
        working.close()
        for one in waiting:
            assert [event for event in one if isinstance(event, Token)]


def test_salted_requests_share_nothing(tiny: Path, store: Store, make_engine: Any) -> None:
    engine = make_engine(store, tiny, block_tokens=64, salt=b"ab")
    prompt = prompt_tokens(200)
    for salt in (b"", b"c", b"d"):
        assert run(engine, prompt, salt=salt).stats.restored_tokens == 0
        assert run(engine, prompt, salt=salt).stats.skip == "full"
    other = make_engine(store, tiny, block_tokens=64, salt=b"a")
    assert run(other, prompt, salt=b"bc").stats.restored_tokens == 0
    assert len(store.namespaces()) == 5


def test_a_ttl_holds_the_state(tiny: Path, store: Store, make_engine: Any) -> None:
    engine = make_engine(store, tiny, block_tokens=64)
    prompt = prompt_tokens(200)
    assert run(engine, prompt, ttl_seconds=1000.0, tenant="t").stats.held
    assert run(engine, prompt, ttl_seconds=2000.0, tenant="t").stats.held
    # Neither a shorter time nor another tenant takes from it.
    assert run(engine, prompt, ttl_seconds=5.0, tenant="t").stats.held
    assert run(engine, prompt, ttl_seconds=7.0, tenant="u").stats.held
    rows = store.sql("SELECT tenant, (expires_at - created_at) / 1000000 FROM sequences").rows
    assert [(tenant, round(seconds, -3)) for tenant, seconds in rows] == [("t", 2000), ("u", 0)]
    store.evict(to_bytes=0)
    # All but the prompt's logits: its last block grew into the answer's.
    assert run(engine, prompt).stats.restored_tokens == 199
