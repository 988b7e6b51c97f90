"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.http.errors import Problem, route_class
from engine.http.levels import Router
from engine.http.openai_shapes import (
    SamplingFields,
    chat_logprobs,
    finish_reason,
    guide_of,
    openai_error,
    openai_usage,
    sampling_of,
    tool_choice_of,
)
from engine.http.respond import respond_as_stream, respond_at_once
from engine.http.service import Service
from engine.http.sse import DONE, frame
from engine.http.turn import (
    Answer,
    Ask,
    CallArguments,
    CallStart,
    Chosen,
    Ended,
    Piece,
    Reasoning,
    Text,
    Turn,
    begin,
)
from engine.http.usage import Usage
from engine.prompt.bodies import parse_body
from kvdb.errors import UsageError

router = Router("inference", prefix="/v1", tags=["OpenAI"], route_class=route_class(openai_error))
MAX_TOP_LOGPROBS = 20


class ChatBody(SamplingFields):
    """A chat. Fields that are not known here are taken and left alone, as clients send many."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@router.post("/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a chat, at once or as a stream."""
    service: Service = request.app.state.service
    turn = await begin(service, request, body.model, _ask(body))
    if body.stream:
        writer = ChatWriter(turn, body.model, body.wants_usage)
        return await respond_as_stream(turn, writer, service.limits.keep_alive_seconds)

    def whole(answers: Sequence[Answer], usage: Usage) -> Mapping[str, Any]:
        return {
            **_head(turn, body.model, "chat.completion"),
            "choices": [_choice(index, answer) for index, answer in enumerate(answers)],
            "usage": openai_usage(usage),
        }

    return await respond_at_once(turn, whole)


def _ask(body: ChatBody) -> Ask:
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    chat = parse_body(
        {"messages": body.messages, "tools": body.tools, "chat_template_kwargs": options}
    )
    return Ask(
        prompt=chat.request(),
        sampling=sampling_of(body),
        max_tokens=body.max_tokens
        if body.max_completion_tokens is None
        else body.max_completion_tokens,
        stop=body.stop,
        logprobs=_logprobs(body),
        n=body.n,
        tool_choice=tool_choice_of(body.tool_choice, body.tools, body.parallel_tool_calls),
        guide=guide_of("response_format", body.response_format),
        kvdb=body.kvdb,
    )


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
        raise UsageError(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}.")
    if not body.logprobs:
        if body.top_logprobs:
            raise UsageError("top_logprobs needs logprobs to be true.")
        return None
    return body.top_logprobs or 0


def _head(turn: Turn, model: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{turn.id}",
        "object": kind,
        "created": turn.created,
        "model": model,
    }


def _choice(index: int, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in answer.calls
        ]
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": chat_logprobs(answer.tokens), "refusal": None}
        if answer.tokens
        else None,
        "finish_reason": finish_reason(answer.reason),
    }


class ChatWriter:
    """The chunks of one stream."""

    def __init__(self, turn: Turn, model: str, wants_usage: bool) -> None:
        self._head = _head(turn, model, "chat.completion.chunk")
        self._answers = turn.n
        self._wants_usage = wants_usage

    def start(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, first) for index in range(self._answers))

    def piece(self, piece: Piece) -> bytes:
        if isinstance(piece, Text):
            return self._chunk(piece.index, {"content": piece.text})
        if isinstance(piece, Reasoning):
            return self._chunk(piece.index, {"reasoning_content": piece.text})
        if isinstance(piece, CallStart):
            call = {"name": piece.name, "arguments": ""}
            return self._call(piece.index, piece.number, call, id=piece.id, type="function")
        if isinstance(piece, CallArguments):
            return self._call(piece.index, piece.number, {"arguments": piece.text})
        if isinstance(piece, Chosen):
            logprobs = {"content": chat_logprobs([piece]), "refusal": None}
            return self._chunk(piece.index, {}, logprobs=logprobs)
        if isinstance(piece, Ended):
            return self._chunk(piece.index, {}, finish_reason(piece.reason))
        return b""

    def end(self, usage: Usage) -> bytes:
        if not self._wants_usage:
            return DONE
        return frame({**self._head, "choices": [], "usage": openai_usage(usage)}) + DONE

    def error(self, problem: Problem) -> bytes:
        return frame(openai_error(problem)) + DONE

    def _call(self, index: int, number: int, function: dict[str, str], **more: str) -> bytes:
        return self._chunk(index, {"tool_calls": [{"index": number, **more, "function": function}]})

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        reason: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "choices": [choice]}
        if self._wants_usage:
            chunk["usage"] = None
        return frame(chunk)
