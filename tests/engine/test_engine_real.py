"""Two rows on a real model, each turn in a process of its own.

Token equality means something here, and on tiny random models it does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from many import ask_all, ends, ids

import kvdb
from engine import Engine, Request
from engine.folders import models_folder

NAME = "smollm2-135m"
MISSING = f"{NAME} is not in {models_folder()}: run `kvdb models pull {NAME}`"
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not (models_folder() / NAME).is_dir(), reason=MISSING),
]

PROGRAM = """
import json, sys
import kvdb
from engine import Engine, Request, Token
from engine.events import End
with kvdb.open(sys.argv[1], min_free_bytes=0) as store, Engine(store, "smollm2-135m") as engine:
    request = Request(**json.loads(sys.argv[2]))
    events = list(engine.generate(request))
    end = events[-1]
    text = "".join(e.text for e in events if isinstance(e, Token)) + end.text
    ids = [e.id for e in events if isinstance(e, Token)]
    values = [e.logprob for e in events if isinstance(e, Token)]
    stats = {name: getattr(end.stats, name) for name in end.stats.__slots__}
    print(json.dumps({"text": text, "ids": ids, "logprobs": values, **stats}))
"""

SYSTEM = "You are a careful assistant. " + " ".join(
    f"Rule {n}: answer in short sentences and name the source of every number." for n in range(9)
)


def ask(store: Path, question: str, **request: Any) -> dict[str, Any]:
    document = {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ],
        "max_tokens": 8,
        "logprobs": 0,
        **request,
    }
    # The tests' single BLAS thread is for tiny models.
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(store), json.dumps(document)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


QUESTION = "What is the capital of France? Answer in one sentence."


def test_the_same_prompt_in_a_new_process_computes_nothing(tmp_path: Path) -> None:
    cold = ask(tmp_path / "store", QUESTION)
    warm = ask(tmp_path / "store", QUESTION)
    assert "Paris" in cold["text"]
    assert (cold["skip"], cold["restored_tokens"]) == ("none", 0)
    assert cold["forwarded_prompt_tokens"] == cold["prompt_tokens"]
    assert (warm["skip"], warm["forwarded_prompt_tokens"]) == ("full", 0)
    assert warm["ids"] == cold["ids"]
    assert warm["logprobs"] == pytest.approx(cold["logprobs"], abs=1e-3)
    assert warm["first_token_ms"] < cold["first_token_ms"] / 20


def test_another_question_on_the_same_prefix_computes_the_rest(tmp_path: Path) -> None:
    ask(tmp_path / "store", QUESTION, max_tokens=1)
    other = "What is the capital of Italy? Answer in one sentence."
    warm = ask(tmp_path / "store", other)
    cold = ask(tmp_path / "empty", other)
    assert warm["restored_tokens"] >= 0.85 * warm["prompt_tokens"]
    assert warm["forwarded_prompt_tokens"] == warm["computed_tokens"] < 30
    assert warm["ids"] == cold["ids"]
    assert warm["logprobs"] == pytest.approx(cold["logprobs"], abs=1e-3)


COUNTRIES = (
    *("France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Norway", "Kenya"),
    *("Cuba", "India", "Chile", "Greece", "Iraq", "Nepal", "Poland", "Oman"),
)


@pytest.mark.slow
def test_sixteen_parallel_requests_equal_serial_ones(tmp_path: Path) -> None:
    """Greedy text, prompts of unlike length, eight decoding together."""
    requests = [
        Request(
            messages=[{"role": "user", "content": "Please. " * number + f"Capital of {name}?"}],
            max_tokens=6,
        )
        for number, name in enumerate(COUNTRIES)
    ]
    with kvdb.open(tmp_path / "store", min_free_bytes=0) as store, Engine(store, NAME) as engine:
        cold = [replace(request, read=False, store=False) for request in requests]
        serial = [list(engine.generate(request)) for request in cold]
        for _ in range(2):  # computed, then restored
            together = ask_all(engine, requests)
            assert [ids(events) for events in together] == [ids(events) for events in serial]
            assert sum(ends(events)[0].stats.shared_steps > 0 for events in together) >= 14
        assert all(ends(events)[0].stats.skip == "full" for events in together)
