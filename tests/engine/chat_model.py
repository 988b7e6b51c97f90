"""A tiny random model with a real tokenizer (byte-level BPE) and a real kind of chat template."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.engine.tiny_model import write_model

# ChatML with tools as one JSON object a line; reasoning of earlier turns is not written again.
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' }}{{- tool | tojson }}
{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
{%- set content = message.content or '' %}
{%- if message.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
VOCABULARY = 1024


def write_chat_model(
    folder: Path, *, seed: int = 0, template: str = TEMPLATE, **config: Any
) -> Path:
    """As :func:`write_model`, with the tokenizer and ``template``."""
    settings = {"vocab_size": VOCABULARY, "eos_token_id": 1, **config}
    write_model(folder, seed=seed, tokenizer=False, **settings)
    write_chat_tokenizer(folder, template)
    return folder


def write_chat_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_backend())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "clean_up_tokenization_spaces": False,
                "chat_template": template,
            }
        )
    )


@cache
def _backend() -> str:
    """Trained on the text at hand: the same bytes give the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    text: str = tokenizer.to_str()
    return text


CORPUS = " ".join(
    [
        "You are a helpful assistant that answers in short sentences about files and cities.",
        'Today is Monday, 2026-11-30 and the time is 10:22:01. {"type": "function", "function":',
        '{"name": "search", "description": "Search the web for a query", "parameters": {"type":',
        '"object", "properties": {"query": {"type": "string", "description": "What to look for"}},',
        '"required": ["query"]}}} user system assistant # Tools <tools> </tools> <tool_call>',
        "The quick brown fox jumps over the lazy dog and reads the weather of the city of Paris.",
        TEMPLATE,
    ]
    * 3
)


def tool(name: str, description: str = "Looks something up", **properties: str) -> dict[str, Any]:
    """A function tool as OpenAI's API has it."""
    given = properties or {"query": "What to look for", "limit": "How many results to give"}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "string", "description": text} for key, text in given.items()
                },
                "required": list(given),
            },
        },
    }
