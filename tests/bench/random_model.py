"""Engines with a random model of a given shape, made in memory: nothing is on disk."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from engine import ModelOptions
from kvdb.identity import ModelIdentity

VOCABULARY = 512
SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
# Three recurrent layers to one of full attention, in the proportions of Qwen3-Next.
HYBRID: dict[str, Any] = {
    **SMALL_LLAMA,
    "model_type": "qwen3_next",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 256,
    "mlp_only_layers": [],
    "moe_intermediate_size": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
}


def use_random_weights(config: dict[str, Any], dtype: str = "float32") -> None:
    """Let engines load a random model of ``config``, whatever the name they are given."""
    from engine import models

    def load(name: str, options: ModelOptions) -> models.LoadedModel:
        import mlx.core as mx
        from mlx_lm.utils import _get_classes

        from engine.mlxlm import CountingModel

        began = time.perf_counter()
        mx.random.seed(0)
        model_class, arguments = _get_classes(config)
        model = model_class(arguments.from_dict(config))
        model.set_dtype(getattr(mx, dtype))
        mx.eval(model.parameters())
        model.eval()
        return models.LoadedModel(
            name=name,
            folder=Path(),
            model=CountingModel(model),
            tokenizer=None,
            prompts=None,
            identity=ModelIdentity("random", json.dumps(config)),
            context=config["max_position_embeddings"],
            eos=frozenset(),
            options=options,
            answer_style=None,
            load_seconds=time.perf_counter() - began,
        )

    models.load = load
