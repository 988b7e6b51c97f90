"""Choosing tokens: one random stream per request, raw logits left alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.events import Sampling
from engine.logits import Row
from engine.sampling import Chooser, _mix, top_logprobs
from kvdb.identity import as_tokens

PROMPT = as_tokens([1, 2, 3])


def logits(seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    values = np.random.default_rng(seed).normal(0, 2, (1, 64)).astype(np.float32)
    return mx.array(values).astype(dtype)


def draw(chooser: Chooser, count: int) -> list[int]:
    ids: list[int] = []
    before = None
    for step in range(count):
        choice = chooser.choose(Row.alone(logits(step)), before)
        before = choice.token
        ids.append(int(choice.token.item()))
    return ids


def test_streams_do_not_touch_each_other() -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    alone = draw(Chooser(sampling, PROMPT, 64), 30)
    one = Chooser(sampling, PROMPT, 64)
    other = Chooser(Sampling(temperature=1.0, seed=4), PROMPT, 64)
    mixed = []
    for step in range(30):
        mixed.append(int(one.choose(Row.alone(logits(step))).token.item()))
        other.choose(Row.alone(logits(step)))
    assert mixed == alone
    assert draw(Chooser(sampling, PROMPT, 64), 30) == alone


def test_seeds_and_positions_give_different_keys() -> None:
    keys = {_mix(seed, position) for seed in range(200) for position in range(50)}
    assert len(keys) == 200 * 50
    assert draw(Chooser(Sampling(temperature=1.0), PROMPT, 64), 30) != draw(
        Chooser(Sampling(temperature=1.0), PROMPT, 64), 30
    )


def test_samples_follow_the_probabilities() -> None:
    chooser = Chooser(Sampling(temperature=1.0, seed=1), PROMPT, 2)
    even = mx.array([[np.log(0.25), np.log(0.75)]])
    drawn = [int(chooser.choose(Row.alone(even)).token.item()) for _ in range(2000)]
    assert np.mean(drawn) == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_processors_leave_the_given_logits_alone(dtype: mx.Dtype) -> None:
    given = logits(dtype=dtype)
    before = np.array(given.astype(mx.float32))
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0)
    choice = Chooser(sampling, PROMPT, 64).choose(Row.alone(given))
    mx.eval(choice.token, choice.row.logprobs)
    assert choice.row.logprobs.dtype == dtype
    assert np.array_equal(np.array(given.astype(mx.float32)), before)


def test_processors_see_prompt_and_answer() -> None:
    """A huge penalty on what was seen: no token of the prompt, none twice."""
    chooser = Chooser(Sampling(presence_penalty=1000.0), PROMPT, 64)
    ids = []
    before = None
    for _ in range(15):
        choice = chooser.choose(Row.alone(logits()), before)
        before = choice.token
        ids.append(int(choice.token.item()))
    assert len(set(ids)) == 15
    assert not set(ids) & {1, 2, 3}


def test_top_logprobs_are_sorted_and_finite() -> None:
    choice = Chooser(Sampling(), PROMPT, 64).choose(Row.alone(logits()))
    chosen, best = top_logprobs(choice, 5)
    assert best[0] == (int(choice.token.item()), chosen)
    assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
    assert top_logprobs(choice, 1000)[1][:5] == best
