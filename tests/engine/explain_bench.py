"""An engine with a chat model and a store, to ask it for pairs of requests and explain them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from chat_model import tool

from engine import Engine, Request, Token
from engine.prompt.encode import encode
from engine.prompt.tokenizer import load_tokenizer
from kvdb.explain import Explanation, explain_request, explain_tokens
from kvdb.store import Store

BLOCK = 32
TOOLS = [tool("search"), tool("weather", city="A city"), tool("read_file", path="A path")]
SYSTEM = (
    "You are a helpful assistant. Today is Monday, 2026-11-30 10:22:01, session 3f2a9c81-77b0. "
    'Answer in short sentences about files and cities. State: {"city": "Paris", "files": 3}. '
    "The quick brown fox jumps over the lazy dog and reads the weather of the city of Paris."
)
QUESTION = "What is the weather in Paris? Say it in one short sentence, for a helpful answer."


def system(text: str = SYSTEM) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str = QUESTION) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def reversed_keys(given: dict[str, Any]) -> dict[str, Any]:
    return {
        key: reversed_keys(value) if isinstance(value, dict) else value
        for key, value in reversed(given.items())
    }


@cache
def independent(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def ids(model: Path, messages: Sequence[Any], tools: Any = None, **options: Any) -> list[int]:
    """Token ids as transformers and mlx-lm have them: the vocabulary has <think>."""
    given: list[int] = independent(model).apply_chat_template(
        list(messages),
        tools=tools,
        add_generation_prompt=True,
        return_dict=False,
        enable_thinking=True,
        **options,
    )
    return given


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@dataclass
class Bench:
    """An engine with a store, and what its last request gave."""

    store: Store
    engine: Engine
    model: Path
    restored: int = 0
    generated: tuple[int, ...] = ()

    def ask(self, messages: Sequence[Any], tools: Any = None, **request: Any) -> int:
        """Run a request to its end; returns its row id."""
        given = {"max_tokens": 4, **request}
        events = list(self.engine.generate(Request(messages=messages, tools=tools, **given)))
        self.store.flush()
        self.restored = events[-1].stats.restored_tokens
        self.generated = tuple(event.id for event in events if isinstance(event, Token))
        return int(self.store.sql("SELECT max(id) FROM requests").rows[0][0])

    def would(self, messages: Sequence[Any], tools: Any = None, **options: Any) -> Explanation:
        """What a request would hit, explained without running it."""
        tokenizer = load_tokenizer(self.model)
        request = Request(messages=messages, tools=tools, template_options=options)
        prompt = encode(request, tokenizer, None, None)
        namespace = self.store.namespaces()[-1]
        return explain_tokens(
            self.store,
            namespace,
            prompt.tokens,
            segments=prompt.segments(),
            text=tokenizer.decode,
        )

    def why(self, request_id: int) -> Explanation:
        return explain_request(self.store, request_id, load_tokenizer(self.model).decode)


def decoded(model: Path, tokens: Sequence[int]) -> str:
    return str(independent(model).decode(tokens, clean_up_tokenization_spaces=False))


Make = Callable[..., Bench]
