"""Tiny random models of real mlx-lm architectures, one for each way that state is kept."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

VOCABULARY = 128
SLOW_DECAY = ("A_log", "recurrent_param")
WINDOW = 40

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "eos_token_id": 127,
}
MLA = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
}


@dataclass(frozen=True)
class Species:
    """One architecture: its config, the cache classes that its layers have (in groups of equal
    layers), and options that quantise the KV cache."""

    config: dict[str, Any]
    classes: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


SPECIES: dict[str, Species] = {
    "llama": Species({"model_type": "llama", "num_hidden_layers": 2}, ("KVCache",)),
    "llama, 8-bit KV": Species(
        {"model_type": "llama", "num_hidden_layers": 2, "head_dim": 32},
        ("QuantizedKVCache",),
        {"kv_bits": 8, "kv_group_size": 32},
    ),
    # The window is longer than a block, but no multiple of it.
    "gemma3_text": Species(
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
        },
        ("RotatingKVCache", "KVCache"),
    ),
    # Six layers, of which the last two read the caches of others.
    "gemma3n": Species(
        {
            "model_type": "gemma3n",
            "text_config": {
                **SMALL,
                "model_type": "gemma3n_text",
                "num_hidden_layers": 6,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCABULARY,
                "sliding_window": WINDOW,
                "rope_local_base_freq": 10000.0,
                "final_logit_softcapping": 30.0,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "activation_sparsity_pattern": [0.0] * 6,
                "hidden_size_per_layer_input": 8,
                "altup_num_inputs": 2,
                "altup_coef_clip": 120.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 8,
            },
        },
        ("RotatingKVCache", "KVCache"),
    ),
    # The window is shorter than a block.
    "gpt_oss": Species(
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 10,
            "rope_scaling": {"rope_type": "default"},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        ("RotatingKVCache", "KVCache"),
    ),
    "llama4": Species(
        {
            "model_type": "llama4",
            "text_config": {
                **SMALL,
                "model_type": "llama4_text",
                "num_hidden_layers": 4,
                "attention_bias": False,
                "attention_chunk_size": 24,
                "interleave_moe_layer_step": 1,
                "intermediate_size_mlp": 48,
                "num_experts_per_tok": 1,
                "num_local_experts": 2,
                "rope_scaling": None,
                "use_qk_norm": True,
            },
        },
        ("ChunkedKVCache", "KVCache"),
    ),
    "deepseek_v3 (MLA)": Species({"model_type": "deepseek_v3", **MLA}, ("KVCache",)),
    "deepseek_v32 (CacheList)": Species(
        {
            "model_type": "deepseek_v32",
            **MLA,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "index_topk": 24,
        },
        ("KVCache", "KVCache"),
    ),
    "qwen3_next": Species(
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 4,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 4,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [],
            "moe_intermediate_size": 16,
            "partial_rotary_factor": 0.5,
            "full_attention_interval": 4,
        },
        ("ArraysCache", "KVCache"),
    ),
    "mamba2": Species(
        {
            "model_type": "mamba2",
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 16,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": False,
            "time_step_limit": [0.0, 100.0],
            "time_step_rank": "auto",
        },
        ("ArraysCache", "Tokens"),
    ),
    # Composite caches of a recurrent and an attention part.
    "falcon_h1 (CacheList)": Species(
        {
            "model_type": "falcon_h1",
            "num_hidden_layers": 2,
            "mamba_d_conv": 4,
            "mamba_d_head": 16,
            "mamba_d_ssm": 32,
            "mamba_d_state": 16,
            "mamba_n_heads": 2,
        },
        ("ArraysCache", "KVCache"),
    ),
    # Recurrent and sliding layers, none that sees everything.
    "recurrent_gemma": Species(
        {
            "model_type": "recurrent_gemma",
            "num_hidden_layers": 3,
            "attention_bias": False,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
        ("ArraysCache", "RotatingKVCache", "Tokens"),
    ),
}


def write_species(folder: Path, name: str, seed: int = 0, dtype: mx.Dtype = mx.float32) -> Path:
    """Write a random model as a folder that mlx-lm loads: matrices normal, all else as the
    architecture initialises it, but for decays: states that forget within ten tokens would hide
    that they were damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SMALL, **SPECIES[name].config}
    (folder / "config.json").write_text(json.dumps(config))
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    key = mx.random.key(seed)
    weights = []
    for path, value in tree_flatten(model.parameters()):
        if value.ndim >= 2:
            key, own = mx.random.split(key)
            scale = 1.6 / max(value.shape[-1], 2) ** 0.5
            value = mx.random.normal(value.shape, key=own) * scale
        elif path.endswith(SLOW_DECAY):
            value = mx.full(value.shape, -5.0)
        weights.append((path, value))
    model.update(tree_unflatten(weights))
    model.set_dtype(dtype)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    return folder
