"""OpenAI's ``/v1/responses``: create, at once or as a stream, get, delete. A response is kept in
the store unless its client says otherwise, so that another one can go on from it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from engine.http.caller import caller_of, read_wishes
from engine.http.errors import NotServed, json_bytes, route_class
from engine.http.levels import Router
from engine.http.openai_responses_tools import ResponseTools, tools_of
from engine.http.openai_responses_writer import ResponseWriter
from engine.http.openai_shapes import guide_of, openai_error, tool_choice_of
from engine.http.respond import frames, json_response, take_all
from engine.http.service import Service
from engine.http.sse import EventStream
from engine.http.turn import Ask, ToolChoice, Turn, begin
from engine.prompt.parts import Data
from engine.prompt.responses import responses_messages, shown_name
from kvdb.errors import KvdbError, PromptError, UsageError
from kvdb.responses import (
    KeptResponse,
    delete_response,
    find_conversation,
    find_response,
    keep_response,
)
from kvdb.store import Store

T = TypeVar("T")

log = logging.getLogger("kvdb.http")
router = Router("inference", prefix="/v1", tags=["OpenAI"], route_class=route_class(openai_error))
MAX_TOP_LOGPROBS = 20
ID = re.compile(r"resp_[0-9a-f]{32}", re.ASCII)


class ResponseBody(BaseModel):
    """What a response is to be. Fields that are not known are taken and left alone."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    kvdb: dict[str, Any] | None = None

    @property
    def items(self) -> list[Data]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input


@router.post("/responses")
async def create_response(body: ResponseBody, request: Request) -> Response:
    """Answer, at once or as a stream."""
    service: Service = request.app.state.service
    wishes = read_wishes(request.headers, body.kvdb, caller_of(request))
    _refuse_what_is_not_here(body)
    earlier = await _earlier(service, body.previous_response_id, wishes.tenant)
    tools = tools_of(body.tools or ())
    turn = await begin(service, request, body.model, _ask(body, earlier, tools))
    keeper = None
    if body.store is not False and wishes.store and service.store is not None:
        keeper = None if service.store.read_only else _Keeper(service, body, wishes.tenant)
    head = _head(turn, body, kept=keeper is not None)
    writer = ResponseWriter(
        head,
        tools.called,
        lambda text: _count(service, body.model, text),
        sealed="reasoning.encrypted_content" in (body.include or ()),
    )
    if body.stream:
        seconds = service.limits.keep_alive_seconds
        try:
            await turn.begun(seconds)
        except BaseException:
            turn.close()
            raise
        return EventStream(_stream(turn, writer, keeper, tools.left_out, seconds))
    writer.end(await take_all(turn, writer.piece))
    return json_response(await _complete(writer, keeper, tools.left_out))


@router.get("/responses/{response_id}")
async def get_response(response_id: str, request: Request) -> Response:
    """A response that was kept."""
    found = await _kept(request, response_id, find_response)
    return Response(found, media_type="application/json")


@router.delete("/responses/{response_id}")
async def forget_response(response_id: str, request: Request) -> Response:
    """Forget a response that was kept."""
    await _kept(request, response_id, delete_response)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def _kept(request: Request, response_id: str, action: Callable[[Store, str, str], T]) -> T:
    """What ``action`` says of a response of the caller's tenant. Raises NotServed for none."""
    service: Service = request.app.state.service
    tenant = read_wishes(request.headers, None, caller_of(request)).tenant
    if service.store is not None and ID.fullmatch(response_id):
        found = await asyncio.to_thread(action, service.store, response_id, tenant)
        if found:
            return found
    raise NotServed(f"There is no response {response_id[:80]!r} here.")


# -- what is asked -------------------------------------------------------------------------------


def _refuse_what_is_not_here(body: ResponseBody) -> None:
    for name, given in (
        ("background", body.background),
        ("conversation", body.conversation),
        ("prompt", body.prompt),
    ):
        if given:
            raise UsageError(f"{name} is not supported here.")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
        raise UsageError(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}.")


async def _earlier(service: Service, response_id: str | None, tenant: str) -> list[Data]:
    """The items of the conversation that a response ended."""
    if response_id is None:
        return []
    store = service.store

    def find() -> list[Data] | None:
        if store is None or not ID.fullmatch(response_id):
            return None
        found = find_conversation(store, response_id, tenant)
        if found is None:
            return None
        items: list[Data] = []
        for kept in found:
            items += json.loads(kept.input)
            items += json.loads(kept.response)["output"]
        return items

    items = await asyncio.to_thread(find)
    if items is None:
        raise UsageError(
            f"previous_response_id: the conversation of {response_id[:80]!r} is not kept here."
        )
    return items


def _ask(body: ResponseBody, earlier: Sequence[Data], tools: ResponseTools) -> Ask:
    items = [*earlier, *body.items]
    messages = responses_messages({"instructions": body.instructions, "input": items})
    if not items or not messages:
        raise PromptError("The prompt is empty.")
    effort = None if body.reasoning is None else body.reasoning.get("effort")
    logprobs = None
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        logprobs = body.top_logprobs or 0
    return Ask(
        prompt={
            "messages": messages,
            "tools": tools.functions or None,
            "template_options": {} if effort is None else {"reasoning_effort": effort},
        },
        sampling={"temperature": body.temperature, "top_p": body.top_p},
        max_tokens=body.max_output_tokens,
        logprobs=logprobs,
        tool_choice=_tool_choice(body, tools),
        guide=guide_of("text.format", (body.text or {}).get("format")),
        kvdb=body.kvdb,
    )


def _tool_choice(body: ResponseBody, tools: ResponseTools) -> ToolChoice:
    choice: object = body.tool_choice
    if isinstance(choice, Mapping) and choice.get("type") in ("function", "custom"):
        name = choice.get("name")
        shown = shown_name(name, choice.get("namespace")) if isinstance(name, str) else None
        choice = {"type": "function", "name": shown}
    return tool_choice_of(choice, tools.functions, body.parallel_tool_calls)


# -- what is answered ----------------------------------------------------------------------------


def _head(turn: Turn, body: ResponseBody, *, kept: bool) -> dict[str, Any]:
    return {
        "id": f"resp_{turn.id}",
        "object": "response",
        "created_at": turn.created,
        "model": body.model,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "store": kept,
        "background": False,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "service_tier": "default",
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _count(service: Service, model: str, text: str) -> int:
    """How many tokens a text has, as far as its model's tokenizer is to be had."""
    facts = service.facts(service.find(model).name)
    if facts is None or facts.prompts is None:
        return 0
    return len(facts.prompts.encode(text, special=False).ids)


@dataclass(frozen=True, slots=True)
class _Keeper:
    """Keeps the response to a body."""

    service: Service
    body: ResponseBody
    tenant: str

    async def keep(self, response: Mapping[str, Any]) -> bool:
        """False where the store cannot take it now: the answer is not lost for that."""
        store, id_ = self.service.store, str(response["id"])
        kept = KeptResponse(json_bytes(self.body.items).decode(), json_bytes(response).decode())
        if store is None:
            return False
        try:
            await asyncio.to_thread(
                keep_response, store, id_, self.tenant, self.body.previous_response_id, kept
            )
        except KvdbError as error:
            log.warning("a response was not kept: %s", error)
            return False
        return True


async def _complete(
    writer: ResponseWriter, keeper: _Keeper | None, left_out: Sequence[str]
) -> dict[str, Any]:
    """The response at its end, kept where it is to be."""
    response = writer.response()
    if left_out:
        kvdb = {**response["usage"]["kvdb"], "left_out_tools": list(left_out)}
        response["usage"] = {**response["usage"], "kvdb": kvdb}
    if keeper is not None and not await keeper.keep(response):
        response["store"] = False
    return response


async def _stream(
    turn: Turn,
    writer: ResponseWriter,
    keeper: _Keeper | None,
    left_out: Sequence[str],
    keep_alive: float,
) -> AsyncGenerator[bytes]:
    async with aclosing(frames(turn, writer, keep_alive)) as bodies:
        async for body in bodies:
            yield body
    if not writer.failed:
        yield writer.last(await _complete(writer, keeper, left_out))
