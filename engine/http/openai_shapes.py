"""What OpenAI's dialects share: request fields, usage, log probabilities, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from engine.guide import Guide
from engine.http.errors import Problem
from engine.http.turn import MAX_CALLS, Chosen, Likely, ToolChoice
from engine.http.usage import Usage
from kvdb.errors import UsageError

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class SamplingFields(BaseModel):
    """Fields of chats and plain completions."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    kvdb: dict[str, Any] | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def sampling_of(body: SamplingFields) -> dict[str, Any]:
    """Keywords of :class:`engine.events.Sampling`. Raises UsageError."""
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    )
    sampling = {name: getattr(body, name) for name in names}
    for name in ("presence_penalty", "frequency_penalty"):
        if sampling[name] is not None and not -2 <= sampling[name] <= 2:
            raise UsageError(f"{name} must be from -2 to 2, not {sampling[name]}.")
    return {**sampling, "logit_bias": _logit_bias(body.logit_bias)}


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise UsageError(f"logit_bias names {key[:40]!r}, which is no token id.")
        if not -100 <= bias <= 100:
            raise UsageError(f"A logit_bias must be from -100 to 100, not {bias}.")
    return {int(key): float(bias) for key, bias in given.items()}


def tool_choice_of(choice: object, tools: object, parallel: bool | None) -> ToolChoice:
    """Of chats and responses. Raises UsageError."""
    if choice in (None, "auto"):
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if not tools:
        raise UsageError("tool_choice needs tools.")
    if choice == "required":
        return ToolChoice("required", most=1 if parallel is False else MAX_CALLS)
    named = choice if isinstance(choice, Mapping) and choice.get("type") == "function" else {}
    function = named.get("function", named)  # responses have its name beside the type
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise UsageError("tool_choice must be auto, none, required, or name a function.")
    return ToolChoice("required", name, 1)


def guide_of(field: str, given: object) -> Guide | None:
    """What an answer must be by the format in a ``field`` of a body. Raises UsageError."""
    form = given if isinstance(given, Mapping) else {}
    kind = form.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return Guide.json()
    described = form.get("json_schema", form)  # responses have the schema beside the type
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise UsageError(
            f"{field} must be of type text, json_object, or json_schema with a schema."
        )
    return Guide.schema(schema)


def openai_usage(usage: Usage) -> dict[str, Any]:
    """``cached_tokens`` are among ``prompt_tokens``."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "kvdb": usage.kvdb,
    }


def chat_logprobs(tokens: Sequence[Chosen]) -> list[dict[str, Any]]:
    return [
        {**_likely(chosen.token), "top_logprobs": [_likely(other) for other in chosen.top]}
        for chosen in tokens
    ]


def _likely(token: Likely) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.raw), "logprob": token.logprob}


def finish_reason(reason: str) -> str:
    """OpenAI has no word for an answer that was cut short otherwise."""
    return "length" if reason == "cancelled" else reason


def openai_error(problem: Problem) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``."""
    other = "server_error" if problem.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": problem.message,
            "type": ERROR_TYPES.get(problem.status, other),
            "param": problem.param,
            "code": problem.code,
        }
    }
