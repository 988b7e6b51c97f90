"""The memory guard: what gives way, in which order, and that a process under a limit lives."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from many import ask_all, ids
from tiny_model import prompt_tokens, run, write_model

from engine import Request
from engine.guard import Gauges, Guard
from kvdb.errors import OutOfMemory
from kvdb.ramtier import PartKey, RamTier

LONG = 16_384
ALLOWED = 400 << 20


@dataclass
class Memory:
    """A process whose memory the test decides."""

    held: int = 0
    cached: int = 0
    active: int = 0
    peak: int = 0
    tier: RamTier[None] = field(default_factory=lambda: RamTier(400))

    def gauges(self) -> Gauges:
        return Gauges(
            held=lambda: self.held + self.cached + self.tier.nbytes,
            active=lambda: self.active,
            peak=lambda: self.peak,
            reset_peak=lambda: None,
            release=lambda: setattr(self, "cached", 0),
        )


def test_caches_give_way_then_the_tier_then_requests_wait_then_they_are_refused() -> None:
    memory = Memory(held=500, cached=50)
    guard = Guard(1000, memory.gauges())
    guard.include(memory.tier)
    for number in range(4):
        memory.tier.put(PartKey(bytes([number]), "kv:0", b""), None, 100)
    memory.cached = 90
    first = guard.claim(50)
    assert first is not None
    assert (memory.cached, memory.tier.nbytes) == (0, 400)
    second = guard.claim(120)
    assert second is not None
    assert memory.tier.nbytes == 300
    third = guard.claim(330)
    assert third is not None
    assert memory.tier.nbytes == 0
    assert guard.claim(1) is None
    with pytest.raises(OutOfMemory, match="max_memory"):
        guard.claim(501)
    assert (guard.stats().waits, guard.stats().refusals, guard.stats().claimed) == (1, 1, 500)
    for claim in (first, second, third, third):
        claim.release()
    assert guard.stats().claimed == 0
    assert memory.tier.budget == 300  # grown back, but for the last fifth
    assert guard.claim(500) is not None


def test_a_waiting_request_goes_on_when_another_ends() -> None:
    guard = Guard(100, Memory().gauges())
    first = guard.claim(80)
    assert first is not None
    assert guard.claim(80) is None
    got: list[Any] = []

    def wait() -> None:
        while (claim := guard.claim(80)) is None:
            guard.wait(10)
        got.append(claim)

    thread = threading.Thread(target=wait)
    thread.start()
    first.release()
    thread.join(10)
    assert got


def test_an_idle_model_goes_before_a_request_waits_or_is_refused() -> None:
    memory = Memory(held=900)
    guard = Guard(1000, memory.gauges())
    idle = [400, 400]
    guard.when_short(lambda: bool(idle))
    for room, left in ((500, 1), (400, 0)):  # refused without; waits without
        while (claim := guard.claim(room)) is None:
            gone = idle.pop()
            memory.held -= gone
            guard.left(gone)
        memory.held += room
        assert (claim.nbytes, len(idle)) == (room, left)
    assert guard.stats().refusals == 0
    with pytest.raises(OutOfMemory):
        guard.claim(1000)


def test_a_model_that_is_being_loaded_counts_beside_what_runs() -> None:
    memory = Memory(held=100)
    guard = Guard(1000, memory.gauges())
    claim = guard.claim(400)  # not yet used
    assert claim is not None
    assert guard.expect(300)
    assert not guard.expect(300)
    assert guard.claim(300) is None
    memory.held += 300
    guard.arrived(300, loaded=True)
    assert guard.claim(300) is None
    claim.release()
    assert guard.claim(300) is not None


def test_steps_grow_while_they_fit_and_shrink_when_they_do_not() -> None:
    memory = Memory(held=1000)
    guard = Guard(21_000, memory.gauges())
    steps = guard.steps(16)
    taken, at = [], 0
    while at < 2048:
        size = steps.fit(256, at)
        with steps.watch(size, at + size):
            memory.peak = memory.active + size * (at + size) // 16  # like unfused attention
        assert memory.peak - memory.active <= 20_000
        taken.append(size)
        at += size
    assert taken[:5] == [16, 32, 64, 128, 256]
    assert taken[-1] < 256
    assert all(size % 16 == 0 for size in taken)
    memory.held = 20_999
    with pytest.raises(OutOfMemory):
        steps.fit(256, at)
    assert Guard(None, memory.gauges()).steps(16).fit(256, 10**6) == 256


def test_room_for_the_steps_of_others_is_waited_for_and_never_a_reason_to_refuse() -> None:
    memory = Memory(held=100)
    guard = Guard(1000, memory.gauges())
    first = guard.claim(400, spare=5000)
    assert first is not None
    assert guard.claim(400, spare=200) is None
    second = guard.claim(400, spare=100)
    assert second is not None
    second.release()
    first.release()
    assert guard.claim(400, spare=600) is not None
    steps = guard.steps(16)
    assert steps.least(1000) == 0  # nothing is known yet
    with steps.watch(32, 64):
        memory.peak = memory.active + 640
    assert [steps.least(end) for end in (16, 64, 128)] == [320, 320, 640]


def test_long_prompts_wait_for_memory_for_each_others_steps(tiny: Path, make_engine: Any) -> None:
    """Their caches fit side by side, but then there is no room to compute."""
    engine = make_engine(None, tiny, block_tokens=64, step=64, max_memory=1 << 40)
    alone = [run(engine, prompt_tokens(1000, seed=n)).ids for n in range(3)]

    def narrow(worker: Any) -> None:
        guard, each = worker.guard, worker.state_bytes(1004)
        guard.settle()
        gauges = guard._gauges
        base, took = guard._before, each // 2
        # What runs holds its caches; each step takes half of one more.
        guard._gauges = replace(gauges, held=lambda: base)
        worker.steps._last = (64, 1000, took)
        worker.steps.watch = lambda tokens, end: nullcontext()
        guard.ceiling = base + 2 * each + took // 2

    engine.call(narrow)
    requests = [Request(tokens=prompt_tokens(1000, seed=n), max_tokens=4) for n in range(3)]
    assert [ids(events) for events in ask_all(engine, requests)] == alone
    assert engine.call(lambda worker: worker.guard.stats().waits) > 0


def test_memory_that_mlx_keeps_for_later_is_given_back() -> None:
    import mlx.core as mx

    from engine.memory import release_memory

    mx.eval(mx.zeros((1 << 20,)))
    assert mx.get_cache_memory() > 0
    release_memory()
    assert mx.get_cache_memory() == 0


def test_a_request_that_does_not_fit_is_refused_and_the_next_one_answered(
    tiny: Path, make_engine: Any
) -> None:
    engine = make_engine(None, tiny, block_tokens=64, max_memory=1)
    with pytest.raises(OutOfMemory):
        run(engine, prompt_tokens(10))
    engine.call(lambda worker: setattr(worker.guard, "ceiling", 1 << 40))
    assert len(run(engine, prompt_tokens(10)).ids) == 4
    assert engine.call(lambda worker: worker.guard.stats().claimed) == 0


CHILD = """
import json, resource, sys
from pathlib import Path
from engine import blas
blas.preload()
from engine import Engine, EngineOptions, Request
from engine.memory import held_bytes

model, guarded, length, allowed = sys.argv[1], sys.argv[2] == "guarded", *map(int, sys.argv[3:])
ceiling = None
options = EngineOptions(block_tokens=256, step=length)
with Engine(None, model, options=options) as engine:
    list(engine.generate(Request(tokens=[1] * 300, max_tokens=2)))
    def limit(worker):
        if guarded:
            worker.guard.ceiling = held_bytes() + allowed
        address_space = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (address_space + 2 * allowed,) * 2)
    engine.call(limit)
    events = list(engine.generate(Request(tokens=[1] * length, max_tokens=1)))
    print(json.dumps([getattr(e, "done", None) for e in events]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS that holds")
def test_under_a_limit_that_one_step_exceeds_the_guard_makes_it_many(tmp_path: Path) -> None:
    """A prompt of 16 K tokens in a process that may take 800 MiB more: attention over all of it
    at once takes more for its scores alone."""
    model = write_model(
        tmp_path / "model",
        num_hidden_layers=2,  # of the last one only keys and values are computed
        num_attention_heads=1,
        hidden_size=32,
        max_position_embeddings=LONG + 8,
    )

    def child(mode: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", CHILD, str(model), mode, str(LONG), str(ALLOWED)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert child("free").returncode != 0
    guarded = child("guarded")
    assert guarded.returncode == 0, guarded.stderr
    steps = [done for done in json.loads(guarded.stdout) if done]
    assert len(steps) > 5
