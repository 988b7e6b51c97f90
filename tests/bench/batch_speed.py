"""What kvdb itself costs the engine thread per decode step of several requests, and what decoding
together gives.

    python -m tests.bench.batch_speed [--model NAME] [--requests 8] [--tokens 300] [--prompt 100]

A tiny random model by default, so that little else is to be seen. "engine" is CPU time of the
engine's thread per decode step of all requests, "bare" that of a loop of nothing but forward,
argmax and reading the token, over a batch cache of the same size: mlx and mlx-lm cost that much
anyway. Their difference is kvdb's own. Both take turns; the spread is that of the bare loop among
itself. "tokens_gain" is how many more tokens a second all give together than one alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))


def decode_with(engine: Any, requests: int, tokens: int, prompt: int) -> tuple[float, float]:
    """Milliseconds per decode step of all requests: CPU time of the engine's thread, and in all."""
    from engine import Request

    dice = np.random.default_rng()
    streams = []

    def arrive(_worker: Any) -> None:
        for number in range(requests):
            request = Request(
                tokens=dice.integers(1, 120, prompt + number).tolist(),
                max_tokens=tokens,
                ignore_eos=True,
            )
            streams.append(engine.generate(request))

    marks: list[tuple[float, float]] = []
    watch = lambda _logits: marks.append((time.thread_time(), time.perf_counter()))  # noqa: E731
    engine.call(lambda worker: setattr(worker, "observe", watch))
    engine.call(arrive)
    for stream in streams:
        for _ in stream:
            pass
    engine.call(lambda worker: setattr(worker, "observe", None))
    # One mark a token: where all decode, none any more prefills and none has ended.
    begin, end = marks[len(marks) * 5 // 10], marks[len(marks) * 9 // 10]
    steps = (len(marks) * 9 // 10 - len(marks) * 5 // 10) / requests
    return (end[0] - begin[0]) * 1e3 / steps, (end[1] - begin[1]) * 1e3 / steps


def decode_bare(engine: Any, requests: int, tokens: int, prompt: int) -> float:
    """The same of a loop of nothing else, on the same thread."""

    def loop(worker: Any) -> float:
        import mlx.core as mx

        from engine import batchkinds

        caches = [worker.new_caches() for _ in range(requests)]
        for cache in caches:
            worker.model.model(mx.zeros((1, prompt), mx.uint32), cache=cache)
        lengths = [prompt] * requests
        layers = [batchkinds.join(layer, lengths) for layer in zip(*caches, strict=True)]
        token = mx.zeros((requests,), mx.uint32)
        mx.eval(token, [layer.state for layer in layers])
        began = time.thread_time()
        for _ in range(tokens):
            logits = worker.model.model(token[:, None], cache=layers)[:, -1, :]
            following = mx.argmax(logits, axis=-1)
            mx.async_eval(following)
            token.tolist()
            token = following
        return (time.thread_time() - began) * 1e3 / tokens

    return float(engine.call(loop))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: a tiny random one")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from engine import blas

    blas.preload()
    from tiny_model import write_model

    import kvdb
    from engine import Engine, EngineOptions

    sizes = options.requests, options.tokens, options.prompt
    bare, ours, stored, together, alone = [], [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(write_model(Path(folder) / "model", tokenizer=False))
        settings = EngineOptions(max_running=options.requests)
        with (
            kvdb.open(Path(folder) / "store", min_free_bytes=0) as store,
            Engine(None, model, options=settings) as engine,
            Engine(store, model, options=settings) as storing,
        ):
            for _ in range(options.rounds):
                bare.append(decode_bare(engine, *sizes))
                cpu, wall = decode_with(engine, *sizes)
                ours.append(cpu)
                together.append(wall)
                stored.append(decode_with(storing, *sizes)[0])
                alone.append(decode_with(engine, 1, options.tokens, options.prompt)[1])
                print(
                    f"bare {bare[-1]:.3f} ms, engine {cpu:.3f}, storing {stored[-1]:.3f}; "
                    f"a step of all {wall:.2f} ms, of one {alone[-1]:.2f}",
                    file=sys.stderr,
                )
    base = min(bare)  # others' work only adds to CPU time
    gain = options.requests * statistics.median(alone) / statistics.median(together)
    json.dump(
        {
            "requests": options.requests,
            "bare_ms": round(base, 3),
            "own_ms": round(min(ours) - base, 3),
            "own_storing_ms": round(min(stored) - base, 3),
            "bare_spread": round(max(bare) / min(bare), 2),
            "step_ms": round(statistics.median(together), 2),
            "step_of_one_ms": round(statistics.median(alone), 2),
            "tokens_gain": round(gain, 2),
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
