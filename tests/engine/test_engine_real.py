"""Two rows on a real model: what one process stored another one restores.

Token equality means something here, and on tiny random models it does not.
"""

from __future__ import annotations

import json
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
with kvdb.open(sys.argv[1], min_free_bytes=0) as store, Engine(store, "smollm2-135m") as engine:
    for document in json.load(sys.stdin):
        events = list(engine.generate(Request(**document)))
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


def ask(store: Path, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """Asks one after the other, all in a process of their own."""
    documents = [
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"What is the capital of {about.pop('of')}?"},
            ],
            "max_tokens": 8,
            "logprobs": 0,
            **about,
        }
        for about in requests
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(store)],
        input=json.dumps(documents),
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_new_process_computes_what_is_new(tmp_path: Path) -> None:
    (cold,) = ask(tmp_path / "store", {"of": "France"})
    warm, other, alone = ask(
        tmp_path / "store",
        {"of": "France"},
        {"of": "Italy"},
        {"of": "Italy", "read": False, "store": False},
    )
    assert "Paris" in cold["text"]
    assert (cold["skip"], cold["restored_tokens"]) == ("none", 0)
    assert cold["forwarded_prompt_tokens"] == cold["prompt_tokens"]
    assert (warm["skip"], warm["forwarded_prompt_tokens"]) == ("full", 0)
    assert warm["ids"] == cold["ids"]
    assert warm["logprobs"] == pytest.approx(cold["logprobs"], abs=1e-3)
    assert warm["first_token_ms"] < cold["first_token_ms"] / 20
    # Another question on the same prefix.
    assert (alone["skip"], alone["restored_tokens"]) == ("none", 0)
    assert other["restored_tokens"] >= 0.85 * other["prompt_tokens"]
    assert other["forwarded_prompt_tokens"] == other["computed_tokens"] < 30
    assert other["ids"] == alone["ids"]
    assert other["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-3)


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
