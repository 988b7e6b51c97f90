"""What storing costs: kvdb's own CPU beside the CPU of an mlx-lm prefill at its default step, and
on the engine's thread per decoded token.

    python -m tests.bench.storing_speed [--model smollm2-135m] [--tokens 1024] [--decoded 64]

kvdb's CPU is that of its calls on the engine's thread and of its writer's thread, measured by
their own clocks. The prefill's is the process's, with mlx-lm's own loop and an equal prompt.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvdb
from engine import Engine, Request


class Meter:
    """CPU seconds that the calling thread spends in wrapped functions, the outermost counting."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def wrap(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside = True
            start = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start
                self._inside = False

        setattr(owner, name, timed)


def thread_cpu(name: str) -> float:
    """CPU seconds that the thread called ``name`` has used."""
    thread = next(thread for thread in threading.enumerate() if thread.name == name)
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def mlx_lm_prefill(engine: Engine, prompt: list[int]) -> float:
    """CPU seconds of the process while mlx-lm prefills ``prompt`` with its default step."""

    def work(worker: Any) -> float:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        start = time.process_time()
        model = worker.model.model
        next(iter(generate_step(mx.array(prompt), model, max_tokens=1)))
        return time.process_time() - start

    return engine.call(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--decoded", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    meter = Meter()
    prefill: list[float] = []
    floor: list[float] = []
    decode: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        kvdb.open(Path(folder) / "store") as store,
        Engine(store, options.model) as engine,
    ):
        from engine import generation, recorder, storage

        for name in ("lease", "release", "hold", "read", "read_part", "put", "record"):
            meter.wrap(storage.Storage, name)
        for name in ("feed", "keep_state"):
            meter.wrap(recorder.Recorder, name)
        meter.wrap(generation.Generation, "_keep_generated")
        for round_ in range(options.rounds):
            random = np.random.default_rng(round_)
            prompt = random.integers(1000, 40_000, options.tokens).tolist()
            floor.append(mlx_lm_prefill(engine, prompt))
            meter.seconds, writer = 0.0, thread_cpu("kvdb-writer")
            _finish(engine, prompt, 1)
            store.flush()
            prefill.append(meter.seconds + thread_cpu("kvdb-writer") - writer)
            meter.seconds = 0.0
            _finish(engine, prompt, 1)
            once, meter.seconds = meter.seconds, 0.0
            _finish(engine, prompt, 1 + options.decoded)
            decode.append((meter.seconds - once) / options.decoded)
            print(
                f"prefill {floor[-1]:.2f} s of CPU, storing {prefill[-1] * 1e3:.0f} ms, "
                f"decoding {decode[-1] * 1e3:.3f} ms a token",
                file=sys.stderr,
            )
    json.dump(
        {
            "tokens": options.tokens,
            "mlx_lm_prefill_cpu_s": round(statistics.median(floor), 3),
            "storing_cpu_s": round(statistics.median(prefill), 4),
            "storing_over_prefill": round(statistics.median(prefill) / statistics.median(floor), 4),
            "prefill_spread": round(max(floor) / min(floor), 2),
            "decode_engine_cpu_ms_per_token": round(statistics.median(decode) * 1e3, 4),
        },
        sys.stdout,
        indent=2,
    )
    print()


def _finish(engine: Engine, prompt: list[int], max_tokens: int) -> None:
    request = Request(tokens=prompt, max_tokens=max_tokens, ignore_eos=True)
    for _ in engine.generate(request):
        pass


if __name__ == "__main__":
    main()
