"""What kvdb itself costs the engine thread per decode step of several requests, and what decoding
together gives.

    python -m tests.bench.batch_speed [--requests 8] [--tokens 300] [--prompt 100] [--rounds 3]

A tiny random model, so that little else is to be seen. "engine" is CPU time of the engine's thread
per decode step of all requests, "bare" the same for a loop of nothing but forward, argmax and
reading the token, over a batch cache of the same size: mlx and mlx-lm cost that much anyway. Their
difference is kvdb's own. Both take turns; the spread is that of the bare loop among itself.
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

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))


def decode_with(engine: Any, requests: int, tokens: int, prompt: int, seed: int) -> float:
    """Milliseconds of the engine thread's CPU time per decode step."""
    from tiny_model import prompt_tokens

    from engine import End, Request, Token

    marks: list[tuple[float, int]] = []
    streams = []

    def arrive(_worker: Any) -> None:
        for number in range(requests):
            request = Request(
                tokens=prompt_tokens(prompt + number, seed * requests + number),
                max_tokens=tokens,
                ignore_eos=True,
            )
            streams.append(engine.generate(request))

    engine.call(arrive)
    count = [0] * requests
    # Once all decode, from mark to mark: every stream gives a token a step.
    for number, stream in enumerate(streams):
        for event in stream:
            if isinstance(event, Token):
                count[number] += 1
                break
    marks.append((engine.call(lambda _worker: time.thread_time()), 0))
    steps = 0
    ends = 0
    first = streams[0]
    for event in first:
        steps += isinstance(event, Token)
        if steps == tokens - 20:
            break
    marks.append((engine.call(lambda _worker: time.thread_time()), steps))
    for stream in streams:
        ends += sum(isinstance(event, End) for event in stream)
    return (marks[1][0] - marks[0][0]) * 1e3 / steps


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
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from engine import blas

    blas.preload()
    from tiny_model import write_model

    import kvdb
    from engine import Engine, EngineOptions

    ours, bare, stored = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", tokenizer=False)
        settings = EngineOptions(max_running=options.requests)
        with (
            kvdb.open(Path(folder) / "store", min_free_bytes=0) as store,
            Engine(None, str(model), options=settings) as engine,
            Engine(store, str(model), options=settings) as storing,
        ):
            sizes = options.requests, options.tokens, options.prompt
            for number in range(options.rounds):
                bare.append(decode_bare(engine, *sizes))
                ours.append(decode_with(engine, *sizes, number))
                stored.append(decode_with(storing, *sizes, number))
                print(
                    f"bare {bare[-1]:.3f} ms, engine {ours[-1]:.3f}, storing {stored[-1]:.3f}",
                    file=sys.stderr,
                )
    base = statistics.median(bare)
    json.dump(
        {
            "requests": options.requests,
            "bare_ms": round(base, 3),
            "engine_ms": round(statistics.median(ours), 3),
            "storing_ms": round(statistics.median(stored), 3),
            "own_ms": round(statistics.median(ours) - base, 3),
            "own_storing_ms": round(statistics.median(stored) - base, 3),
            "bare_spread": round(max(bare) / min(bare), 2),
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
