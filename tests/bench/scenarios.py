"""Four ways to ask a real model, each against the same prompt without a store, in one run.

    python -m tests.bench.scenarios [--model smollm2-135m] [--rounds 3]

First request; the same prompt again; a tenth of it changed at its end; the same prompt after a
restart (a new process, its model loaded). Times to the first token, without loading the model. The
spread is that of the cold runs of one prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import kvdb
from engine import End, Engine, Request

RULE = "Rule {n}: file {n} of the project is read before it is changed, and tested afterwards.\n"
RULES = 50
CHANGED = RULES // 10
SCENARIOS = ("first request", "same prompt again", "10 % changed at the end", "after a restart")


def prompt(round_: int, changed: bool = False) -> list[dict[str, str]]:
    """About 1,100 tokens; with ``changed``, the last tenth of them is another."""
    rules = [RULE.format(n=n) for n in range(RULES)]
    if changed:
        rules[-CHANGED:] = [rule.replace("project", "library") for rule in rules[-CHANGED:]]
    system = f"You are a coding assistant, number {round_}.\n" + "".join(rules)
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": "Which rule is the last one?"},
    ]


def ask(engine: Engine, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    *_, end = engine.generate(Request(messages=messages, max_tokens=2, **options))
    assert isinstance(end, End)
    stats = end.stats
    return {
        "ms": stats.lookup_ms
        + stats.restore_ms
        - stats.behind_ms
        + stats.prefill_ms
        + (stats.first_sample_ms or 0.0),
        "restored": stats.restored_tokens,
        "computed": stats.computed_tokens,
        "prompt": stats.prompt_tokens,
        "skip": stats.skip,
    }


def child(model: str, store: str, round_: int) -> None:
    """The same prompt in this process; prints what it took."""
    with kvdb.open(store) as opened, Engine(opened, model) as engine:
        json.dump(ask(engine, prompt(round_)), sys.stdout)


def after_restart(model: str, store: Path, round_: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.scenarios", "--model", model]
    command += ["--child", str(store), "--round", str(round_)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def one_round(engine: Engine, store: kvdb.Store, model: str, round_: int) -> dict[str, Any]:
    """What each scenario took, and its prompt without a store, taking turns."""
    found: dict[str, Any] = {}
    without = {"read": False, "store": False}
    same, other = prompt(round_), prompt(round_, changed=True)
    cold = [ask(engine, same, **without)]
    found[SCENARIOS[0]] = ask(engine, same)
    store.flush()
    found[SCENARIOS[1]] = ask(engine, same)
    cold.append(ask(engine, same, **without))
    found[SCENARIOS[2]] = ask(engine, other)
    changed = ask(engine, other, **without)
    store.flush()
    found[SCENARIOS[3]] = after_restart(model, store.path, round_)
    cold.append(ask(engine, same, **without))
    floor = statistics.median(run["ms"] for run in cold)
    for name, run in found.items():
        run["cold"] = changed["ms"] if name == SCENARIOS[2] else floor
    found["spread"] = max(run["ms"] for run in cold) / min(run["ms"] for run in cold)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", metavar="STORE", help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.model, options.child, options.round)
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        kvdb.open(Path(folder) / "store") as store,
        Engine(store, options.model) as engine,
    ):
        ask(engine, prompt(-1)[1:], read=False, store=False)  # the first forward sets up
        rounds = [one_round(engine, store, options.model, n) for n in range(options.rounds)]
    print("| scenario | prompt | restored | computed | first token | without kvdb | sooner |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in SCENARIOS:
        runs = [found[name] for found in rounds]
        spent, cold = (statistics.median(run[key] for run in runs) for key in ("ms", "cold"))
        tokens = " | ".join(f"{runs[-1][key]:,}" for key in ("prompt", "restored", "computed"))
        print(f"| {name} | {tokens} | {spent:,.1f} ms | {cold:,.0f} ms | {cold / spent:,.2f} × |")
    print(f"\ncold against itself: {statistics.median(f['spread'] for f in rounds):.2f}")


if __name__ == "__main__":
    main()
