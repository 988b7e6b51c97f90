"""Tiny random models as mlx-lm folders, and helpers to run them and compare logits."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine import End, Engine, Event, Request, Sampling, Stats, Token

VOCABULARY = 128
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 127,
}


def write_model(
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "F32",
    tokenizer: bool = True,
    **config: Any,
) -> Path:
    """Write a random llama: the same seed and config give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**CONFIG, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    write_tensors(folder / "model.safetensors", _weights(settings, seed), dtype)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_adapter(folder: Path, *, seed: int) -> Path:
    """A LoRA adapter over the query projections."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "fine_tune_type": "lora",
                "num_layers": 2,
                "lora_parameters": {
                    "rank": 4,
                    "scale": 20.0,
                    "dropout": 0.0,
                    "keys": ["self_attn.k_proj"],
                },
            }
        )
    )
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.k_proj"
        tensors[f"{name}.lora_a"] = rng.normal(0, 0.2, (64, 4)).astype(np.float32)
        tensors[f"{name}.lora_b"] = rng.normal(0, 0.2, (4, 32)).astype(np.float32)
    write_tensors(folder / "adapters.safetensors", tensors, "F32")
    return folder


def write_tensors(path: Path, tensors: dict[str, npt.NDArray[np.float32]], dtype: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    body = b""
    for name, value in tensors.items():
        data = value.tobytes()
        if dtype == "BF16":
            data = (value.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def _weights(config: dict[str, Any], seed: int) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    dim, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head

    def matrix(rows: int, columns: int, scale: float = 1.6) -> npt.NDArray[np.float32]:
        return rng.normal(0, scale / columns**0.5, (rows, columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], dim),
        "model.norm.weight": np.ones(dim, np.float32),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.self_attn.q_proj.weight": matrix(queries, dim),
            f"{name}.self_attn.k_proj.weight": matrix(keys, dim),
            f"{name}.self_attn.v_proj.weight": matrix(keys, dim),
            f"{name}.self_attn.o_proj.weight": matrix(dim, queries),
            f"{name}.mlp.gate_proj.weight": matrix(inner, dim),
            f"{name}.mlp.up_proj.weight": matrix(inner, dim),
            f"{name}.mlp.down_proj.weight": matrix(dim, inner),
            f"{name}.input_layernorm.weight": np.ones(dim, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(dim, np.float32),
        }
    return weights


def write_tokenizer(folder: Path) -> None:
    """One token a character: ids 0 to 127 are ASCII, 127 ends."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code for code in range(127)} | {"<eos>": 127}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",  # noqa: S106
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    wrapped.save_pretrained(folder)


def prompt_tokens(count: int, seed: int = 1) -> list[int]:
    """Random ids that never end generation."""
    return np.random.default_rng(seed).integers(0, VOCABULARY - 1, count).tolist()


@dataclass(frozen=True)
class Run:
    """What one request gave: its events, and the raw logits of every chosen token."""

    events: tuple[Event, ...]
    logits: npt.NDArray[np.float32]

    @property
    def tokens(self) -> tuple[Token, ...]:
        return tuple(event for event in self.events if isinstance(event, Token))

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def end(self) -> End:
        end = self.events[-1]
        assert isinstance(end, End)
        return end

    @property
    def stats(self) -> Stats:
        return self.end.stats

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens) + self.end.text


def run(engine: Engine, tokens: Sequence[int] | None = None, **request: Any) -> Run:
    """Run a request to its end, and let its state reach the store."""
    import mlx.core as mx

    seen: list[npt.NDArray[np.float32]] = []

    def observe(logits: mx.array) -> None:
        seen.append(np.array(logits.astype(mx.float32))[0])

    def watch(worker: Any) -> None:
        worker.observe = observe

    engine.call(watch)
    if tokens is not None:
        request["tokens"] = tokens
    request.setdefault("max_tokens", 4)
    request.setdefault("sampling", Sampling(seed=7))
    events = tuple(engine.generate(Request(**request)))
    engine.call(_flush)
    return Run(events, np.stack(seen[: sum(isinstance(e, Token) for e in events)]))


def _flush(worker: Any) -> None:
    if worker.storage is not None:
        worker.storage.store.flush(30)


def difference(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    """max|a−b| / max|a| over the logits of all steps."""
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / np.abs(a).max())


def equal(a: Run, b: Run, reuse: str) -> bool:
    """DESIGN's "equal": the logits of every step, bit for bit in exact mode."""
    if reuse == "exact":
        return bool(np.array_equal(a.logits, b.logits))
    return difference(a.logits, b.logits) <= 1e-4
