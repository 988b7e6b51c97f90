"""The dialects through their official clients: an answer in one form, whole or streamed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import anthropic
import openai

Ask = Callable[[str, dict[str, Any]], "Told"]


@dataclass
class Told:
    """What a client was told. Of several answers texts, ends and so on are by their index; calls
    are names and arguments."""

    texts: list[str]
    ends: list[str | None]
    calls: list[tuple[str, Any]] = field(default_factory=list)
    thoughts: str = ""
    logprobs: list[list[str]] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def said(self) -> tuple[Any, ...]:
        """What is the same whether it is streamed, and whatever is cached by then."""
        said = (self.texts, self.ends, self.calls, self.thoughts, self.logprobs)
        return (*said, self.prompt, self.generated)


@cache  # making a client takes longer than most calls
def _openai(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def _counted(told: Told, usage: Any) -> Told:
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    told.prompt, told.generated = usage.prompt_tokens, usage.completion_tokens
    told.cached = usage.prompt_tokens_details.cached_tokens
    return told


def chat(url: str, body: dict[str, Any]) -> Told:
    answer: Any = _openai(url).chat.completions.create(**body)
    choices = answer.choices
    told = Told(
        [choice.message.content or "" for choice in choices],
        [choice.finish_reason for choice in choices],
        [
            (call.function.name, json.loads(call.function.arguments))
            for choice in choices
            for call in choice.message.tool_calls or ()
        ],
        "".join(getattr(choice.message, "reasoning_content", None) or "" for choice in choices),
        [
            [t.token for t in choice.logprobs.content] if choice.logprobs else []
            for choice in choices
        ],
    )
    return _counted(told, answer.usage)


def chat_streamed(url: str, body: dict[str, Any]) -> Told:
    parts: dict[int, dict[str, Any]] = defaultdict(
        lambda: {"text": "", "end": None, "logprobs": []}
    )
    calls: dict[tuple[int, int], list[str]] = {}
    thoughts, usage = "", None
    options = {"include_usage": True}
    stream: Any = _openai(url).chat.completions.create(stream=True, stream_options=options, **body)
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            part, delta = parts[choice.index], choice.delta
            assert part["end"] is None
            part["text"] += delta.content or ""
            part["end"] = choice.finish_reason
            part["logprobs"] += (
                [t.token for t in choice.logprobs.content] if choice.logprobs else []
            )
            thoughts += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                known = calls.setdefault((choice.index, call.index), [call.function.name, ""])
                known[1] += call.function.arguments
    ordered = [parts[index] for index in sorted(parts)]
    told = Told(
        [part["text"] for part in ordered],
        [part["end"] for part in ordered],
        [(name, json.loads(given)) for _, (name, given) in sorted(calls.items())],
        thoughts,
        [part["logprobs"] for part in ordered],
    )
    return _counted(told, usage)


def completions(url: str, body: dict[str, Any]) -> Told:
    answer: Any = _openai(url).completions.create(**body)
    told = Told([c.text for c in answer.choices], [c.finish_reason for c in answer.choices])
    told.logprobs = [c.logprobs.tokens if c.logprobs else [] for c in answer.choices]
    return _counted(told, answer.usage)


def completions_streamed(url: str, body: dict[str, Any]) -> Told:
    parts: dict[int, dict[str, Any]] = defaultdict(
        lambda: {"text": "", "end": None, "logprobs": []}
    )
    usage = None
    options = {"include_usage": True}
    stream: Any = _openai(url).completions.create(stream=True, stream_options=options, **body)
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            part = parts[choice.index]
            part["text"] += choice.text
            part["end"] = choice.finish_reason
            part["logprobs"] += choice.logprobs.tokens if choice.logprobs else []
    ordered = [parts[index] for index in sorted(parts)]
    told = Told([part["text"] for part in ordered], [part["end"] for part in ordered])
    told.logprobs = [part["logprobs"] for part in ordered]
    return _counted(told, usage)


def _response(answer: Any) -> Told:
    told = Told([answer.output_text], [answer.status])
    for item in answer.output:
        if item.type == "function_call":
            told.calls.append((item.name, json.loads(item.arguments)))
        elif item.type == "reasoning":
            told.thoughts += "".join(part.text for part in item.content or ())
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    told.prompt, told.generated = usage.input_tokens, usage.output_tokens
    told.cached = usage.input_tokens_details.cached_tokens
    return told


def responses(url: str, body: dict[str, Any]) -> Told:
    return _response(_openai(url).responses.create(**body))


def responses_streamed(url: str, body: dict[str, Any]) -> Told:
    stream: Any = _openai(url).responses.create(stream=True, **body)
    text = ""
    for event in stream:
        text += event.delta if event.type == "response.output_text.delta" else ""
    told = _response(event.response)
    assert told.texts == [text]
    return told


@cache
def _anthropic(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def _message(answer: Any) -> Told:
    end = answer.stop_reason if answer.stop_sequence is None else answer.stop_sequence
    told = Told(["".join(part.text for part in answer.content if part.type == "text")], [end])
    for part in answer.content:
        if part.type == "tool_use":
            told.calls.append((part.name, part.input))
        elif part.type == "thinking":
            told.thoughts += part.thinking
    usage = answer.usage
    read, made = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    assert min(usage.input_tokens, read, made) >= 0
    told.prompt, told.cached = usage.input_tokens + read + made, read
    told.generated = usage.output_tokens
    return told


def messages(url: str, body: dict[str, Any]) -> Told:
    return _message(_anthropic(url).messages.create(**body))


def messages_streamed(url: str, body: dict[str, Any]) -> Told:
    with _anthropic(url).messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        told = _message(stream.get_final_message())
    assert told.texts == [text]
    return told


DIALECTS: dict[str, tuple[Ask, Ask]] = {
    "chat": (chat, chat_streamed),
    "completions": (completions, completions_streamed),
    "responses": (responses, responses_streamed),
    "messages": (messages, messages_streamed),
}
