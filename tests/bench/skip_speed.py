"""First token of a full skip against a cold prefill: a 1,000-token prompt as token ids, each run in
a new process, the model loaded.

    python -m tests.bench.skip_speed [--model smollm2-135m] [--tokens 1000] [--rounds 5]

Cold and full skip take turns; the spread is that of the cold runs among themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


def child(model: str, store: str, tokens: int, seed: int) -> None:
    """One request in this process; prints its statistics."""
    import kvdb
    from engine import End, Engine, Request

    prompt = np.random.default_rng(seed).integers(1000, 40_000, tokens).tolist()
    with kvdb.open(store) as opened, Engine(opened, model) as engine:
        request = Request(tokens=prompt, max_tokens=4)
        for event in engine.generate(request):
            if isinstance(event, End):
                stats = event.stats
                json.dump(
                    {
                        "first_token_ms": stats.first_token_ms,
                        "lookup_ms": stats.lookup_ms,
                        "forwarded_prompt_tokens": stats.forwarded_prompt_tokens,
                        "skip": stats.skip,
                        "load_ms": stats.load_ms,
                    },
                    sys.stdout,
                )


def run(options: argparse.Namespace, store: str, seed: int) -> dict[str, float]:
    """The statistics of one request in a new process."""
    command = [sys.executable, "-m", "tests.bench.skip_speed", "--child", store]
    command += ["--model", options.model, "--tokens", str(options.tokens), "--seed", str(seed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", metavar="STORE")
    options = parser.parse_args()
    if options.child:
        child(options.model, options.child, options.tokens, options.seed)
        return
    cold: list[float] = []
    skip: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        for seed in range(options.rounds):
            first, again = run(options, store, seed), run(options, store, seed)
            if (first["skip"], again["skip"]) != ("none", "full"):
                sys.exit(f"expected a cold run and a full skip, not {first} and {again}")
            cold.append(first["first_token_ms"])
            skip.append(again["first_token_ms"])
            print(f"cold {cold[-1]:.0f} ms, full skip {skip[-1]:.1f} ms", file=sys.stderr)
    json.dump(
        {
            "tokens": options.tokens,
            "cold_ms": round(statistics.median(cold), 1),
            "full_skip_ms": round(statistics.median(skip), 2),
            "full_skip_ms_worst": round(max(skip), 2),
            "sooner": round(statistics.median(cold) / statistics.median(skip), 1),
            "cold_spread": round(max(cold) / min(cold), 2),
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
