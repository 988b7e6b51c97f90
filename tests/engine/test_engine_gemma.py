"""Gemma-3-270M, whose layers mostly look back at 512 tokens: restored past its window, by a new
process, it says what it says when it is cold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.folders import models_folder

NAME = "gemma3-270m"
MISSING = f"{NAME} is not in {models_folder()}: run `kvdb models pull {NAME}`"
pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(not (models_folder() / NAME).is_dir(), reason=MISSING),
]

PROGRAM = """
import json, sys
import kvdb
from engine import Engine, Request, Token
with kvdb.open(sys.argv[1], min_free_bytes=0) as store, Engine(store, "gemma3-270m") as engine:
    for document in json.load(sys.stdin):
        events = list(engine.generate(Request(**document)))
        tokens = [e for e in events if isinstance(e, Token)]
        stats = {name: getattr(events[-1].stats, name) for name in events[-1].stats.__slots__}
        answer = {"text": "".join(t.text for t in tokens), "ids": [t.id for t in tokens]}
        print(json.dumps({**answer, "logprobs": [t.logprob for t in tokens], **stats}))
"""

FACTS = " ".join(
    f"In the year {1900 + 7 * n} the town of number {n} had {113 * n + 29} people and a river."
    for n in range(24)
)
END = " The capital of France is the city of"


def ask(store: Path, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    documents = [{"max_tokens": 5, "logprobs": 0, **request} for request in requests]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(store)],
        input=json.dumps(documents),
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_prompt_longer_than_the_window_continues_in_a_new_process(tmp_path: Path) -> None:
    (cold,) = ask(tmp_path / "store", {"text": FACTS + END})
    assert cold["prompt_tokens"] > 512 + 64
    assert "Paris" in cold["text"]
    earlier = FACTS[: len(FACTS) // 2] + END  # where the window has long passed
    again, diverged, reference = ask(
        tmp_path / "store",
        {"text": FACTS + END},
        {"text": earlier},
        {"text": earlier, "read": False, "store": False},
    )
    assert (again["skip"], again["forwarded_prompt_tokens"]) == ("full", 0)
    assert again["ids"] == cold["ids"]
    assert again["logprobs"] == pytest.approx(cold["logprobs"], abs=1e-3)
    assert diverged["restored_tokens"] > 250
    assert diverged["computed_tokens"] < 30
    assert diverged["ids"] == reference["ids"]
    assert diverged["logprobs"] == pytest.approx(reference["logprobs"], abs=1e-3)
