"""Faults that a hostile reader found once: each is its own kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_engine_refill import Chain
from tiny_model import prompt_tokens, run

from engine import Engine, EngineOptions, ModelOptions, Request, Sampling
from kvdb.errors import ModelError, PromptError, UsageError
from kvdb.store import Store

BLOCK = 64


@pytest.mark.parametrize("block", [0, 4])
def test_wrong_output_after_a_rejected_load_of_logits_and_of_state(
    tiny: Path, store: Store, block: int
) -> None:
    with Engine(store, str(tiny), options=EngineOptions(block_tokens=BLOCK, step=BLOCK)) as engine:
        chain = Chain(store, engine, "max", 77 + block)
        path, offset, _ = chain.locate(-1, "logits")
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"\xff\xff\xff\xff")
        chain.breaks({block})
        again = run(engine, prompt_tokens(600), reuse="max")
        assert again.ids == chain.first.ids


@pytest.mark.parametrize("token", [-1, 1 << 20, 1.5, "5"])
def test_a_bias_beyond_the_vocabulary_is_refused(tiny: Path, token: Any) -> None:
    with (
        Engine(None, str(tiny)) as engine,
        pytest.raises(UsageError, match="no token id"),
    ):
        run(engine, prompt_tokens(5), sampling=Sampling(logit_bias={token: 1.0}))


def test_quantisation_that_does_not_fit_the_model_is_one_sentence(tiny: Path) -> None:
    with pytest.raises((UsageError, ModelError), match="kv_bits"):
        Engine(None, str(tiny), model_options=ModelOptions(kv_bits=4, kv_group_size=128))


def test_a_request_dropped_before_its_first_event_is_cancelled(tiny: Path) -> None:
    with Engine(None, str(tiny)) as engine:
        engine.generate(Request(tokens=prompt_tokens(2000), max_tokens=2000)).close()  # type: ignore[attr-defined]
        assert len(run(engine, prompt_tokens(5), max_tokens=2).ids) == 2


@pytest.mark.parametrize(
    "bad", [{"text": "\ud800"}, {"messages": ["x"]}, {"messages": [{"role": "user"}], "tools": [1]}]
)
def test_prompts_that_are_no_text_are_refused(tiny: Path, bad: dict[str, Any]) -> None:
    with Engine(None, str(tiny)) as engine, pytest.raises((PromptError, UsageError)):
        list(engine.generate(Request(**bad)))


def test_counts_that_are_no_integers_are_refused() -> None:
    with pytest.raises(UsageError):
        Request(text="x", max_tokens=2.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        Sampling(seed=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        {"tenant": "\ud800"},
        {"client": "a\udfffb"},
        {"tenant": 5},
        {"ttl_seconds": 1e12},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": float("inf")},
        {"repetition_context": 1 << 31},
        {"logit_bias": {1: 10**400}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {1: "x"}},
    ],
)
def test_values_that_nothing_can_use_are_refused_at_once(bad: dict[str, Any]) -> None:
    sampling = {name: value for name, value in bad.items() if name in Sampling.__slots__}
    others = {name: value for name, value in bad.items() if name not in sampling}
    with pytest.raises(UsageError):
        Request(tokens=[1], sampling=Sampling(**sampling), **others)
