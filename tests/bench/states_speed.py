"""What boundary states cost: CPU of a hybrid model's prefill that stores its states, at the stride
that the engine chooses, against the same prefill storing only what attention layers keep.

    python -m tests.bench.states_speed [--tokens 4096] [--rounds 7]

A random model in the proportions of Qwen3-Next. CPU is that of the whole process, the writer's
thread among it; prompts differ from round to round, the runs take turns.
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

import kvdb
from engine import Engine, Request
from tests.bench.random_model import HYBRID, VOCABULARY, use_random_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    use_random_weights(HYBRID)
    random = np.random.default_rng(0)
    times: dict[str, list[float]] = {"nothing": [], "attention": [], "all": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        kvdb.open(Path(folder) / "store", queue_bytes=4 << 30) as store,
        Engine(store, "random") as engine,
    ):
        from engine import boundaries, generation

        chosen = generation.boundaries

        def none(*_: Any, **__: Any) -> Any:
            return boundaries.NO_BOUNDARIES

        for round_ in range(options.rounds + 1):
            for name in times:
                prompt = random.integers(0, VOCABULARY, options.tokens).tolist()
                generation.boundaries = none if name == "attention" else chosen
                began = time.process_time()
                request = Request(
                    tokens=prompt, max_tokens=1, ignore_eos=True, store=name != "nothing"
                )
                for _ in engine.generate(request):
                    pass
                store.flush()
                if round_:  # the first one allocates
                    times[name].append(time.process_time() - began)
        rows = store.sql(
            "SELECT CASE WHEN part LIKE 'state:%' THEN 'states' ELSE 'others' END, count(*), "
            "sum(nbytes) FROM parts GROUP BY 1"
        ).rows
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    json.dump(
        {
            "tokens": options.tokens,
            "cpu_s": {name: round(spent, 3) for name, spent in medians.items()},
            "spread": {name: round(max(t) / min(t), 3) for name, t in times.items()},
            "states_cost": {
                "of_prefill": round(
                    (medians["all"] - medians["attention"]) / medians["nothing"], 4
                ),
                "goal": 0.05,
            },
            "storing_all_costs": round(medians["all"] / medians["nothing"] - 1, 4),
            "parts": {kind: {"count": count, "bytes": nbytes} for kind, count, nbytes in rows},
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
