"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``. Its version and beta headers are
taken and left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from engine.guide import Guide
from engine.http.anthropic_shapes import PING, MessageWriter, anthropic_error
from engine.http.caller import caller_of, read_wishes
from engine.http.errors import route_class
from engine.http.levels import Router
from engine.http.respond import json_response, respond_as_stream, take_all
from engine.http.service import Service
from engine.http.turn import MAX_CALLS, Ask, ToolChoice, begin, request_of
from engine.prompt.anthropic import anthropic_messages
from engine.prompt.parts import Data, tool_of
from kvdb.errors import PromptError, UsageError

router = Router(
    "inference", prefix="/v1", tags=["Anthropic"], route_class=route_class(anthropic_error)
)
# Types of tools that clients run themselves.
OWN_TOOLS = (None, "custom")


class PromptBody(BaseModel):
    """What makes the prompt. Fields that are not known are taken and left alone."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    kvdb: dict[str, Any] | None = None


class MessagesBody(PromptBody):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None


@router.post("/messages")
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation, at once or as a stream."""
    service: Service = request.app.state.service
    ask = Ask(
        prompt=await _prompt(service, body),
        sampling={key: getattr(body, key) for key in ("temperature", "top_p", "top_k")},
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        tool_choice=_tool_choice(body),
        guide=_guide(body),
        kvdb=body.kvdb,
    )
    turn = await begin(service, request, body.model, ask)
    writer = MessageWriter(turn, body.model)
    if body.stream:
        return await respond_as_stream(turn, writer, service.limits.keep_alive_seconds, PING)
    usage = await take_all(turn, writer.piece)
    return json_response(writer.whole(usage))


@router.post("/messages/count_tokens")
async def count_tokens(body: PromptBody, request: Request) -> Response:
    """How many tokens the prompt of a body has."""
    service: Service = request.app.state.service
    served = service.find(body.model)
    wishes = read_wishes(request.headers, body.kvdb, caller_of(request))
    ask = Ask(await _prompt(service, body), kvdb=body.kvdb)
    asked = request_of(ask, wishes, served, service.limits)
    return json_response({"input_tokens": await service.count(served.name, asked)})


async def _prompt(service: Service, body: PromptBody) -> dict[str, Any]:
    """The prompt, as keywords of the engine's request."""
    document = body.model_dump()
    if body.mcp_servers:
        raise UsageError("mcp_servers are called by Anthropic, and cannot be used here.")
    tools = tuple(map(_tool, body.tools)) if body.tools else None
    options = _options(body)
    chat, marks = anthropic_messages(document)
    if not chat:
        raise PromptError("The prompt is empty.")
    in_midst = any(message["role"] == "system" for message in chat[1:])
    if in_midst and not await _renders(service, body.model, chat, tools, options):
        chat, marks = anthropic_messages(document, fold_system=True)
    return {"messages": chat, "tools": tools, "template_options": options, "marks": tuple(marks)}


async def _renders(
    service: Service, model: str, chat: list[Data], tools: Any, options: Mapping[str, Any]
) -> bool:
    """Whether the model's template takes system messages in the midst of a chat."""
    facts = await service.loaded_facts(service.find(model).name)
    template = None if facts.prompts is None else facts.prompts.template
    if template is None:
        return False
    try:
        await asyncio.to_thread(template.render, chat, tools, options=options)
    except PromptError:
        return False
    return True


def _tool(tool: Mapping[str, Any]) -> Data:
    if tool.get("type") not in OWN_TOOLS:
        raise UsageError(
            f"Tools of type {str(tool['type'])[:60]!r} are run or described by Anthropic: only "
            "tools with an input_schema of their own can be used here."
        )
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), Mapping):
        raise UsageError("A tool needs a name and an input_schema.")
    return tool_of(tool)


def _options(body: PromptBody) -> dict[str, Any]:
    """What chat templates know of thinking."""
    options: dict[str, Any] = {}
    kind = None if body.thinking is None else body.thinking.get("type")
    if kind is not None:
        if kind not in ("enabled", "adaptive", "disabled"):
            raise UsageError("thinking must be of type enabled, adaptive or disabled.")
        options["enable_thinking"] = kind != "disabled"
    effort = None if body.output_config is None else body.output_config.get("effort")
    if effort is not None:
        options["reasoning_effort"] = effort
    return options


def _tool_choice(body: PromptBody) -> ToolChoice:
    choice = body.tool_choice
    kind = "auto" if choice is None else choice.get("type")
    if choice is None or kind == "auto":
        return ToolChoice()
    if kind == "none":
        return ToolChoice("none")
    if not body.tools:
        raise UsageError("tool_choice needs tools.")
    if kind == "any":
        most = 1 if choice.get("disable_parallel_tool_use") else MAX_CALLS
        return ToolChoice("required", most=most)
    name = choice.get("name")
    if kind != "tool" or not isinstance(name, str):
        raise UsageError("tool_choice must be auto, any, none, or a tool by its name.")
    return ToolChoice("required", name, 1)


def _guide(body: PromptBody) -> Guide | None:
    given = None if body.output_config is None else body.output_config.get("format")
    if given is None:
        return None
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(schema, Mapping) or given.get("type") != "json_schema":
        raise UsageError("output_config.format must be of type json_schema, with a schema.")
    return Guide.schema(schema)
