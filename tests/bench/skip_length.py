"""First token of a full skip, by the length of the prompt: 16 K tokens against 1 K.

    python -m tests.bench.skip_length [--short 1024] [--long 16384] [--rounds 15]

A small random model, prompts as token ids, no RAM tier; the two take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

import kvdb
from engine import End, Engine, Request
from tests.bench.random_model import SMALL_LLAMA, VOCABULARY, use_random_weights


def first_token_ms(engine: Engine, prompt: list[int], **options: bool) -> tuple[str, float]:
    *_, end = engine.generate(Request(tokens=prompt, max_tokens=2, ignore_eos=True, **options))
    assert isinstance(end, End)
    assert end.stats.first_token_ms is not None
    return end.stats.skip, end.stats.first_token_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", type=int, default=1024)
    parser.add_argument("--long", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    use_random_weights(SMALL_LLAMA)
    random = np.random.default_rng(0)
    prompts = {
        name: random.integers(0, VOCABULARY, count).tolist()
        for name, count in (("short", options.short), ("long", options.long))
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        kvdb.open(Path(folder) / "store", queue_bytes=4 << 30) as store,
        Engine(store, "random") as engine,
    ):
        cold = {name: first_token_ms(engine, prompt)[1] for name, prompt in prompts.items()}
        store.flush()
        times: dict[str, list[float]] = {name: [] for name in prompts}
        for _ in range(options.rounds):
            for name, prompt in prompts.items():
                skip, spent = first_token_ms(engine, prompt, store=False)
                assert skip == "full", skip
                times[name].append(spent)
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    halves = [statistics.median(times["short"][part::2]) for part in (0, 1)]
    json.dump(
        {
            "tokens": [options.short, options.long],
            "cold_ms": {name: round(spent, 1) for name, spent in cold.items()},
            "full_skip_ms": {name: round(spent, 2) for name, spent in medians.items()},
            "long_over_short": {"ratio": round(medians["long"] / medians["short"], 2), "goal": 2},
            "short_against_itself": round(max(halves) / min(halves), 2),
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
