"""Models: from a name to a folder, from a folder to a loaded model with its identity."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.answers.style import AnswerStyle
from engine.fingerprint import (
    DigestMemory,
    adapter_files,
    identity_files,
    model_identity,
    signature,
    weight_files,
)
from engine.folders import cache_folder, models_folder
from engine.prompt.tokenizer import PromptTokenizer, adopt, answer_style, remember
from engine.pull import BUILT_IN
from kvdb.errors import ModelError, UsageError
from kvdb.identity import ModelIdentity

if TYPE_CHECKING:
    from engine.mlxlm import CountingModel

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = [
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jinja",
]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
# Weights up to this size are read to name a model, though nobody loads it.
QUICK_BYTES = 256 << 20
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to load a model. ``config`` overrides entries of its config.json; ``kv_bits`` quantises
    the KV cache from the first token on."""

    adapter: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.kv_bits is not None and self.kv_bits not in (2, 3, 4, 6, 8):
            raise UsageError(f"kv_bits must be 2, 3, 4, 6 or 8, not {self.kv_bits}.")
        if self.kv_group_size not in (32, 64, 128):
            raise UsageError(f"kv_group_size must be 32, 64 or 128, not {self.kv_group_size}.")
        if self.kv_bits is not None and self.quantized_kv_start != 0:
            raise UsageError(
                "quantized_kv_start must be 0: a cache that is quantised midway is "
                "not a function of its prefix."
            )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, usable only on the thread that loaded it. ``answer_style`` is None without
    a tokenizer."""

    name: str
    folder: Path
    model: CountingModel
    tokenizer: Any | None
    prompts: PromptTokenizer | None
    answer_style: AnswerStyle | None
    identity: ModelIdentity
    context: int | None
    eos: frozenset[int]
    options: ModelOptions
    load_seconds: float


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What of a loaded model can be used on any thread. ``context`` is the longest prompt,
    ``vocabulary`` the number of token ids."""

    name: str
    context: int | None
    vocabulary: int
    prompts: PromptTokenizer | None
    answer_style: AnswerStyle | None
    load_seconds: float
    warmup_seconds: float


def resolve(name: str) -> Path:
    """The folder of a model given by folder, by built-in name, or by hub id (downloaded if it is
    not here). Raises ModelError if there is none."""
    if name in BUILT_IN:
        folder = models_folder() / name
        if not folder.is_dir():
            raise ModelError(f"The model {name} is not here yet: run `kvdb models pull {name}`.")
        return folder
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{name} is not a model folder.")
    if name.startswith((".", "/", "~")) or not HUB_ID.fullmatch(name):
        raise ModelError(
            f"There is no model {name!r}: give a folder, a hub id (owner/name), or "
            f"one of {', '.join(BUILT_IN)}."
        )
    return _from_hub(name)


def weight_bytes(name: str) -> int:
    """Bytes of a model's weight files, about what it takes in memory. Raises ModelError."""
    folder = resolve(name)
    try:
        return sum(path.stat().st_size for path in weight_files(folder))
    except OSError as error:
        raise ModelError(f"The model in {folder} cannot be read: {error}.") from error


def find_local(name: str) -> Path | None:
    """The folder of a model as for :func:`resolve`, if it is on this machine."""
    path = models_folder() / name if name in BUILT_IN else Path(name).expanduser()
    if path.is_dir():
        return path
    return _downloaded(name) if HUB_ID.fullmatch(name) else None


def _downloaded(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError):  # not here, or not all of it
        return None


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    local = _downloaded(name)
    if local is not None:
        return local
    failures = (HfHubHTTPError, HFValidationError, OSError, ValueError)
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except failures as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelError(
            f"The model {name!r} could not be fetched from the hub: {reason}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``, or ModelError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{folder} is not a model folder: it has no config.json.") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} names no model_type.")
    return config


def check_files(folder: Path, adapter: Path | None = None) -> None:
    """Raise ModelError unless all weight files are there and well-formed.

    MLX accepts overlapping, truncated and overflowing tensors, so it never sees an unchecked file.
    """
    from safetensors import SafetensorError, safe_open

    files = weight_files(folder)
    if not files:
        raise ModelError(f"{folder} has no weights (model*.safetensors).")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} cannot be read: {error!r}.") from error
        missing = sorted(str(name) for name in names if not (folder / str(name)).exists())
        if missing:
            raise ModelError(f"{folder} lacks the weight file {missing[0]}: fetch the model again.")
    if adapter is not None:
        for path in adapter_files(adapter):
            if not path.exists():
                raise ModelError(f"The adapter {adapter} has no {path.name}.")
        files = [*files, adapter / "adapters.safetensors"]
    for path in files:
        try:
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged: {error}.") from error


def load(name: str, options: ModelOptions) -> LoadedModel:
    """Load a model on the calling thread, which stays the only one that may use it.

    Raises ModelError in one sentence whatever is wrong with the name or the folder, and if a file
    changes while it is loaded.
    """
    started = time.perf_counter()
    folder = resolve(name)
    config = {**read_config(folder), **options.config}
    check_files(folder, options.adapter)
    adapters = () if options.adapter is None else (options.adapter,)
    memory = DigestMemory(cache_folder())
    try:
        files = identity_files(folder, config, adapters)
        before = [signature(path) for path in files]
        identity = model_identity(
            folder, config, memory, adapters=adapters, overrides=options.config
        )
        model, tokenizer, config = _load(folder, options)
        changed = [signature(path) for path in files] != before
    except OSError as error:
        raise ModelError(f"The model in {folder} cannot be read: {error}.") from error
    if changed:
        raise ModelError(f"The files in {folder} changed while they were loaded: try again.")
    memory.save()
    prompts = None if tokenizer is None else adopt(tokenizer)
    if prompts is not None:
        remember(folder, prompts)
    return LoadedModel(
        name,
        folder,
        model,
        tokenizer,
        prompts,
        None if tokenizer is None else answer_style(tokenizer),
        identity,
        context_length(config),
        _eos(config, tokenizer),
        options,
        time.perf_counter() - started,
    )


def quick_identity(folder: Path, options: ModelOptions) -> ModelIdentity:
    """The identity of a model that is not loaded. Where its weights' digests are not remembered
    and reading them takes long, ``weights`` is empty. Raises ModelError."""
    config = {**read_config(folder), **options.config}
    adapters = () if options.adapter is None else (options.adapter,)
    memory = DigestMemory(cache_folder())
    try:
        unknown = [path for path in weight_files(folder) if not memory.knows(path)]
        known = sum(path.stat().st_size for path in unknown) <= QUICK_BYTES
        identity = model_identity(
            folder,
            config,
            memory,
            adapters=adapters,
            overrides=options.config,
            weights=weight_files(folder) if known else (),
        )
    except OSError as error:
        raise ModelError(f"The model in {folder} cannot be read: {error}.") from error
    memory.save()
    return identity if known else replace(identity, weights="")


def _load(folder: Path, options: ModelOptions) -> tuple[CountingModel, Any | None, dict[str, Any]]:
    """The model, its tokenizer if it has one, and its config as mlx-lm completed it."""
    # It would tell every user on stderr that PyTorch is missing, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from mlx_lm.utils import load_adapters, load_model, load_tokenizer

    from engine.mlxlm import CountingModel

    try:
        model, config = load_model(
            folder, model_config=dict(options.config), trust_remote_code=options.trust_remote_code
        )
        if options.adapter is not None:
            model = load_adapters(model, str(options.adapter))
        model.eval()
        tokenizer = None
        if any((folder / file).exists() for file in TOKENIZER_FILES):
            tokenizer = load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
    except OSError:
        raise
    except Exception as error:  # whatever mlx-lm, transformers and tokenizers make of bad files
        reason = " ".join(str(error).split()) or repr(error)
        raise ModelError(f"The model in {folder} cannot be loaded: {reason[:300]}") from error
    return CountingModel(model), tokenizer, config


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest prompt the model was made for, if its config says."""
    text_config = config.get("text_config")
    for scope in (config, text_config if isinstance(text_config, dict) else {}):
        for key in CONTEXT_KEYS:
            if isinstance(scope.get(key), int) and scope[key] > 0:
                return int(scope[key])
    return None


def _eos(config: Mapping[str, Any], tokenizer: Any | None) -> frozenset[int]:
    if tokenizer is not None:
        return frozenset(tokenizer.eos_token_ids)
    ids = config.get("eos_token_id")
    if isinstance(ids, int):
        return frozenset((ids,))
    return frozenset(ids) if isinstance(ids, list) else frozenset()
