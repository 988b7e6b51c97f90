"""mlx-lm's own generation as the oracle: kvdb's loop computes what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import prompt_tokens, run

from engine import Engine, Sampling


def mlx_lm_logprobs(engine: Engine, prompt: list[int], count: int, **options: Any) -> Any:
    """Token ids and log probabilities of ``count`` steps by mlx_lm.generate.generate_step."""

    def generate(worker: Any) -> tuple[list[int], Any]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step
        from mlx_lm.sample_utils import make_logits_processors

        steps = generate_step(
            mx.array(prompt),
            worker.loaded.model.model,
            mx.default_stream(mx.default_device()),
            max_tokens=count,
            logits_processors=make_logits_processors(**options),
            prompt_cache=worker.new_caches(),
        )
        made = [(token, np.array(logprobs)) for token, logprobs in steps]
        return [token for token, _ in made], np.stack([values for _, values in made])

    return engine.call(generate)


@pytest.mark.parametrize("length", [1, 2, 33, 300, 700])
@pytest.mark.parametrize("reuse", ["max", "exact"])
def test_greedy_equals_mlx_lm(tiny: Path, make_engine: Any, length: int, reuse: str) -> None:
    engine = make_engine(None, tiny)
    prompt = prompt_tokens(length, seed=length)
    ids, logprobs = mlx_lm_logprobs(engine, prompt, 8)
    ours = run(engine, prompt, max_tokens=8, reuse=reuse, ignore_eos=True)
    values = ours.logits - np.log(np.exp(ours.logits).sum(-1, keepdims=True))
    assert ours.ids == ids
    assert np.abs(values - logprobs).max() / np.abs(logprobs).max() <= 1e-4


def test_processors_equal_mlx_lm(tiny: Path, make_engine: Any) -> None:
    engine = make_engine(None, tiny)
    prompt = prompt_tokens(60, seed=2)
    ids, logprobs = mlx_lm_logprobs(
        engine, prompt, 30, repetition_penalty=1.5, presence_penalty=0.4, logit_bias={5: 1.0}
    )
    sampling = Sampling(repetition_penalty=1.5, presence_penalty=0.4, logit_bias={5: 1.0})
    ours = run(engine, prompt, max_tokens=30, sampling=sampling, logprobs=0, ignore_eos=True)
    assert ours.ids == ids
    chosen = [logprobs[step, token] for step, token in enumerate(ids)]
    assert [token.logprob for token in ours.tokens] == pytest.approx(chosen, abs=1e-4)


def test_quantised_equals_mlx_lm(tiny: Path, make_engine: Any) -> None:
    engine = make_engine(None, tiny, kv_bits=8, kv_group_size=32)
    prompt = prompt_tokens(300, seed=8)
    ids, _ = mlx_lm_logprobs(engine, prompt, 8)
    assert run(engine, prompt, max_tokens=8, ignore_eos=True).ids == ids
