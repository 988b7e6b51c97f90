"""``/v1/completions``: text that goes on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.http.errors import Problem, route_class
from engine.http.levels import Router
from engine.http.openai_shapes import (
    SamplingFields,
    finish_reason,
    openai_error,
    openai_usage,
    sampling_of,
)
from engine.http.respond import frames, json_response
from engine.http.service import Service
from engine.http.sse import DONE, EventStream, frame
from engine.http.turn import Answer, Ask, Chosen, Ended, Piece, Text, Turn, begin
from engine.http.usage import Usage, usage_of_all
from kvdb.errors import UsageError

router = Router("inference", prefix="/v1", tags=["OpenAI"], route_class=route_class(openai_error))
MAX_LOGPROBS = 20
MAX_PROMPTS = 64


class CompletionBody(SamplingFields):
    """A prompt or several, as texts or token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


@router.post("/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Go on with a text, at once or as a stream."""
    service: Service = request.app.state.service
    _check(body)
    prompts = _prompts(body.prompt)
    with ExitStack() as stack:  # what is begun is closed again when a later one is refused
        turns = []
        for prompt in prompts:
            turns.append(await begin(service, request, body.model, _ask(body, prompt)))
            stack.callback(turns[-1].close)
        echoes = await _echoes(service, body, prompts)
        head = _head(turns[0], body.model)
        if not body.stream:
            return json_response(await _whole(turns, echoes, head))
        await turns[0].begun(service.limits.keep_alive_seconds)
        stack.pop_all()
    return EventStream(_stream(turns, echoes, head, body, service.limits.keep_alive_seconds))


def _check(body: CompletionBody) -> None:
    if body.suffix:
        raise UsageError("suffix is not supported: the models here only go on with a text.")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UsageError("best_of other than n is not supported.")
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise UsageError(f"logprobs must be from 0 to {MAX_LOGPROBS}.")
    if body.echo and body.logprobs is not None:
        raise UsageError("echo together with logprobs is not supported.")


def _prompts(given: str | Sequence[Any]) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise UsageError("The prompt is empty.")
    if isinstance(given[0], int):
        return [[int(token) for token in given]]
    if len(given) > MAX_PROMPTS:
        raise UsageError(f"There may be at most {MAX_PROMPTS} prompts, not {len(given)}.")
    return list(given)


def _ask(body: CompletionBody, prompt: str | list[int]) -> Ask:
    if not prompt:
        raise UsageError("The prompt is empty.")
    return Ask(
        prompt={"text": prompt} if isinstance(prompt, str) else {"tokens": prompt},
        sampling=sampling_of(body),
        max_tokens=body.max_tokens,
        stop=body.stop,
        logprobs=body.logprobs,
        n=body.n,
        kvdb=body.kvdb,
    )


async def _echoes(
    service: Service, body: CompletionBody, prompts: Sequence[str | list[int]]
) -> list[str]:
    """What each answer begins with: nothing, or its prompt's text."""
    if not body.echo:
        return [""] * len(prompts)
    facts = await service.loaded_facts(service.find(body.model).name)
    decode = (lambda ids: "") if facts.prompts is None else facts.prompts.decode
    return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]


def _head(turn: Turn, model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{turn.id}",
        "object": "text_completion",
        "created": turn.created,
        "model": model,
    }


async def _whole(
    turns: Sequence[Turn], echoes: Sequence[str], head: Mapping[str, Any]
) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for turn, echo in zip(turns, echoes, strict=True):
        for answer in await turn.answers():
            choices.append(_choice(len(choices), echo, answer))
    usage = usage_of_all([turn.usage() for turn in turns])
    return {**head, "choices": choices, "usage": openai_usage(usage)}


def _choice(index: int, echo: str, answer: Answer) -> dict[str, Any]:
    return {
        "index": index,
        "text": echo + answer.text,
        "logprobs": _logprobs(answer.tokens, 0) if answer.tokens else None,
        "finish_reason": finish_reason(answer.reason),
    }


def _logprobs(tokens: Sequence[Chosen], offset: int) -> dict[str, Any]:
    """Lists with an item for each token; ``offset`` is where the first one's text begins."""
    offsets = []
    for chosen in tokens:
        offsets.append(offset)
        offset += len(chosen.token.text)
    return {
        "tokens": [chosen.token.text for chosen in tokens],
        "token_logprobs": [chosen.token.logprob for chosen in tokens],
        "top_logprobs": [{each.text: each.logprob for each in chosen.top} for chosen in tokens],
        "text_offset": offsets,
    }


async def _stream(
    turns: Sequence[Turn],
    echoes: Sequence[str],
    head: Mapping[str, Any],
    body: CompletionBody,
    keep_alive: float,
) -> AsyncGenerator[bytes]:
    """The answers to one prompt after those to the other, while all are worked on."""
    writer = CompletionWriter(head, body.wants_usage)
    with ExitStack() as stack:
        for turn in turns:
            stack.callback(turn.close)
        for turn, echo in zip(turns, echoes, strict=True):
            writer.echo, writer.answers = echo, turn.n
            async for body_ in frames(turn, writer, keep_alive):
                yield body_
            if writer.failed:
                break
            writer.base += turn.n
        else:
            yield writer.usage(usage_of_all([turn.usage() for turn in turns]))
        yield DONE


class CompletionWriter:
    """The chunks of one stream. ``base`` is the number of the current prompt's first answer."""

    def __init__(self, head: Mapping[str, Any], wants_usage: bool) -> None:
        self._head = head
        self._wants_usage = wants_usage
        self._offsets: dict[int, int] = {}
        self.base = 0
        self.answers = 1
        self.echo = ""
        self.failed = False

    def start(self) -> bytes:
        if not self.echo:
            return b""
        return b"".join(self._chunk(index, self.echo) for index in range(self.answers))

    def piece(self, piece: Piece) -> bytes:
        if isinstance(piece, Text):
            return self._chunk(piece.index, piece.text)
        if isinstance(piece, Chosen):
            offset = self._offsets.get(self.base + piece.index, 0)
            self._offsets[self.base + piece.index] = offset + len(piece.token.text)
            return self._chunk(piece.index, "", logprobs=_logprobs([piece], offset))
        if isinstance(piece, Ended):
            return self._chunk(piece.index, "", reason=finish_reason(piece.reason))
        return b""

    def end(self, usage: Usage) -> bytes:
        return b""  # the sum of all prompts' usage comes last

    def error(self, problem: Problem) -> bytes:
        self.failed = True
        return frame(openai_error(problem))

    def usage(self, usage: Usage) -> bytes:
        if not self._wants_usage:
            return b""
        return frame({**self._head, "choices": [], "usage": openai_usage(usage)})

    def _chunk(
        self,
        index: int,
        text: str,
        reason: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": self.base + index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        chunk = {**self._head, "choices": [choice]}
        if self._wants_usage:
            chunk["usage"] = None
        return frame(chunk)
