"""Across the seam of a full skip nothing changes: a restored answer is the cold answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import Run, difference, prompt_tokens, run

import kvdb
from engine import Engine, EngineOptions, Progress, Request, Sampling, Token
from engine.events import End
from kvdb.errors import PromptError, UsageError

PROMPT = prompt_tokens(150, seed=4)
SAMPLED = Sampling(temperature=1.0, seed=11)

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 12},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "logprobs": {"max_tokens": 6, "logprobs": 5},
    "sampled": {"max_tokens": 24, "sampling": SAMPLED},
    "top_p, min_p": {
        "max_tokens": 24,
        "sampling": Sampling(temperature=1.3, top_p=0.9, min_p=0.01, seed=5),
    },
    "top_k": {"max_tokens": 24, "sampling": Sampling(temperature=1.3, top_k=9, seed=5)},
    "processors": {
        "max_tokens": 24,
        "logprobs": 3,
        "sampling": Sampling(
            repetition_penalty=1.4,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            logit_bias={3: 2.0},
        ),
    },
    "sampled processors": {
        "max_tokens": 24,
        "sampling": Sampling(temperature=0.8, repetition_penalty=1.3, seed=3),
    },
}


@pytest.fixture(scope="module")
def engines(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    """``(one without a store, one whose store holds the whole prompt)``."""
    with (
        kvdb.open(tmp_path_factory.mktemp("seam") / "store", min_free_bytes=0) as store,
        Engine(None, str(tiny)) as cold,
        Engine(store, str(tiny), options=EngineOptions(64)) as warm,
    ):
        run(warm, PROMPT, max_tokens=1)
        yield cold, warm


def same(cold: Run, warm: Run) -> None:
    assert warm.stats.skip == "full"
    assert warm.stats.forwarded_prompt_tokens == 0
    assert warm.ids == cold.ids
    assert warm.text == cold.text
    assert warm.end.reason == cold.end.reason
    assert difference(cold.logits, warm.logits) <= 1e-4
    for a, b in zip(cold.tokens, warm.tokens, strict=True):
        assert a.text == b.text
        assert (a.logprob is None) == (b.logprob is None)
        if a.logprob is not None and b.logprob is not None:
            assert b.logprob == pytest.approx(a.logprob, abs=1e-4)
        assert [token for token, _ in a.top_logprobs] == [token for token, _ in b.top_logprobs]


@pytest.mark.parametrize("name", REQUESTS)
def test_full_skip_gives_the_cold_answer(engines: tuple[Engine, Engine], name: str) -> None:
    cold, warm = engines
    same(run(cold, PROMPT, **REQUESTS[name]), run(warm, PROMPT, **REQUESTS[name]))


def test_stop_texts_across_token_borders(engines: tuple[Engine, Engine]) -> None:
    """A stop text that begins with the first token, whose logits were stored, and ends later."""
    cold, _ = engines
    options: dict[str, Any] = {"max_tokens": 24, "sampling": SAMPLED, "ignore_eos": True}
    whole = run(cold, PROMPT, **options).text
    assert len(whole) == 24
    for start, length in ((0, 3), (5, 2), (10, 1)):
        stop = whole[start : start + length]
        runs = [run(engine, PROMPT, stop=(stop,), **options) for engine in engines]
        same(*runs)
        assert runs[1].text == whole[: whole.index(stop)]
        assert runs[1].end.reason == "stop"
        assert stop not in runs[1].text


def test_stop_tokens_and_eos(engines: tuple[Engine, Engine]) -> None:
    cold, warm = engines
    options: dict[str, Any] = {"max_tokens": 24, "sampling": SAMPLED, "ignore_eos": True}
    ids = run(cold, PROMPT, **options).ids
    for at in (0, 4):
        runs = [run(engine, PROMPT, stop_tokens=(ids[at],), **options) for engine in engines]
        same(*runs)
        assert runs[1].ids == ids[: ids.index(ids[at]) + 1]
        assert runs[1].end.reason == "stop"
    ends = Sampling(logit_bias={127: 1e9})
    assert run(warm, PROMPT, sampling=ends).ids == [127]
    assert run(warm, PROMPT, sampling=ends, ignore_eos=True, max_tokens=3).ids == [127] * 3


def test_equal_seeds_give_equal_tokens_whatever_ran_between(
    engines: tuple[Engine, Engine],
) -> None:
    _, warm = engines
    first = run(warm, PROMPT, max_tokens=20, sampling=SAMPLED).ids
    run(warm, PROMPT, max_tokens=7, sampling=Sampling(temperature=1.0, seed=99))
    assert run(warm, PROMPT, max_tokens=20, sampling=SAMPLED).ids == first
    other = run(warm, PROMPT, max_tokens=20, sampling=Sampling(temperature=1.0, seed=12)).ids
    assert other != first


def test_the_first_token_of_a_full_skip_comes_before_anything_is_read(
    engines: tuple[Engine, Engine],
) -> None:
    _, warm = engines
    events = run(warm, PROMPT).events
    assert isinstance(events[0], Token)
    assert isinstance(events[1], Progress)
    only = run(warm, PROMPT, max_tokens=1)
    assert only.stats.bytes_read == 0
    assert only.stats.forwarded_tokens == 0
    assert (only.stats.skip, only.stats.restored_tokens) == ("full", len(PROMPT))


def test_processors_leave_stored_logits_raw(engines: tuple[Engine, Engine]) -> None:
    """Processors assign into the array they get; what is stored must not be that array."""
    cold, warm = engines
    prompt = prompt_tokens(70, seed=9)
    biased = Sampling(repetition_penalty=1.9, presence_penalty=2.0)
    run(warm, prompt, sampling=biased, max_tokens=1)
    same(run(cold, prompt), run(warm, prompt))


def test_logprobs_are_log_probabilities(engines: tuple[Engine, Engine]) -> None:
    _, warm = engines
    tokens = run(warm, PROMPT, logprobs=128).tokens
    for token in tokens:
        assert len(token.top_logprobs) == 128
        assert sum(np.exp(value) for _, value in token.top_logprobs) == pytest.approx(1, abs=1e-3)
        assert token.top_logprobs[0] == (token.id, token.logprob)
    assert run(warm, PROMPT, logprobs=0).tokens[0].top_logprobs == ()


def test_text_and_messages_become_the_same_ids(engines: tuple[Engine, Engine]) -> None:
    _, warm = engines
    text = "user: Hello there\nassistant: "
    first = run(warm, text=text)
    chat = run(warm, messages=[{"role": "user", "content": "Hello there"}])
    ids = run(warm, list(text.encode()))
    assert first.stats.prompt_tokens == chat.stats.prompt_tokens == len(text)
    assert chat.stats.skip == ids.stats.skip == "full"
    assert first.ids == chat.ids == ids.ids


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"tokens": []}, "empty"),
        ({"text": ""}, "empty"),
        ({"messages": []}, "empty"),
        ({"tokens": [1] * 4097}, "4097 tokens"),
        ({"tokens": [1, 128]}, "vocabulary"),
    ],
)
def test_bad_prompts_are_refused_in_one_sentence(
    engines: tuple[Engine, Engine], prompt: dict[str, Any], words: str
) -> None:
    for engine in engines:
        with pytest.raises(PromptError, match=words) as caught:
            list(engine.generate(Request(**prompt)))
        assert "\n" not in str(caught.value)


def test_generation_ends_with_the_context(engines: tuple[Engine, Engine]) -> None:
    cold, _ = engines
    events = list(cold.generate(Request(tokens=[1] * 4090, max_tokens=50, ignore_eos=True)))
    end = events[-1]
    assert isinstance(end, End)
    assert (end.reason, end.stats.generated_tokens) == ("length", 6)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"text": "a", "tokens": [1]},
        {"text": "a", "max_tokens": 0},
        {"text": "a", "reuse": "most"},
        {"text": "a", "stop": ("",)},
        {"text": "a", "logprobs": -1},
    ],
)
def test_bad_requests_are_usage_errors(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Request(**bad)


def test_bad_sampling_is_a_usage_error(engines: tuple[Engine, Engine]) -> None:
    for bad in ({"temperature": -1}, {"top_p": 2}, {"min_p": -0.1}, {"top_k": -1}):
        with pytest.raises(UsageError):
            Sampling(**bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="top_k"):
        list(engines[0].generate(Request(text="a", sampling=Sampling(temperature=1, top_k=500))))
