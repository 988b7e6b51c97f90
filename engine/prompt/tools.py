"""Tools for models whose chat template has none: rendered by ours, through the model's own.

The tools go into the system message, calls into the text of the assistant's message that made them,
results into user messages. The format is that of Hermes and Qwen, which most models have seen:
``<tools>``, ``<tool_call>`` with one JSON object, ``<tool_response>``; mlx-lm's ``json_tools``
parses the calls. What is written for a message does not depend on later ones, but for templates
that insist on alternating turns: there, results that come together are one turn.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.prompt.template import ChatTemplate, Data, Span, plain
from kvdb.errors import PromptError

INTRODUCTION = """\
# Tools

You may call one or more of these functions to help with what the user asks:
<tools>
"""
INSTRUCTIONS = """\
</tools>

To call a function, write its name and arguments as one JSON object between these tags:
<tool_call>
{"name": "function name", "arguments": {"argument": "value"}}
</tool_call>
The result comes back between <tool_response> and </tool_response>."""
APART = "\n\n"

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


def chat_template(
    source: str | Mapping[str, str], specials: Mapping[str, Any], thinking: bool
) -> ChatTemplate:
    """A model's chat template, with ours for tools where it has none."""
    template = ChatTemplate(source, specials, thinking)
    return template if template.has_tools else ToolTemplate(source, specials, thinking)


def uses_tools(messages: Messages, tools: Tools | None) -> bool:
    """Are there tools, calls or results in a chat?"""
    return bool(tools) or any(
        message.get("tool_calls") or message.get("role") == "tool" for message in messages
    )


class ToolTemplate(ChatTemplate):
    """A model's chat template that has no tools, and what it makes of chats with tools."""

    def render(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        def attempt(chat: Messages) -> str:
            return super(ToolTemplate, self).render(
                chat, add_generation_prompt=add_generation_prompt, options=options
            )

        if not uses_tools(messages, tools):
            return attempt(messages)
        refusal: PromptError | None = None
        for chat in _ways(messages, tools or ()):
            try:
                return attempt([message.data for message in chat])
            except PromptError as error:
                refusal = refusal or error
        raise refusal or PromptError("The prompt is empty.")

    def spans(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        text: str,
    ) -> list[Span] | None:
        if not uses_tools(messages, tools):
            return super().spans(messages, options=options, text=text)
        for chat in _ways(messages, tools or ()):
            found = super().spans([message.data for message in chat], options=options, text=text)
            if found is not None:
                spans = [own for span in found for own in _spans(chat[span.index], span, text)]
                spans += _tool_spans(tools or (), text)
                return sorted(spans, key=lambda span: (span.start, -span.end))
        return None


@dataclass(frozen=True, slots=True)
class _Message:
    """A message for the model's template, and which of the request's it holds, each with its
    text; none of them in a system message that only has tools."""

    data: Data
    holds: tuple[tuple[int, str], ...]


def _ways(messages: Messages, tools: Tools) -> Iterator[list[_Message]]:
    """A chat as messages without tools, and as templates want it that are strict about turns:
    alternating ones, and no system's."""
    chat = [_message(index, message) for index, message in enumerate(messages)]
    section = tools_section(tools)
    with_system = _under(chat, "system", section)
    yield with_system
    yield _alternating(with_system)
    yield _alternating(_under(chat, "user", section))


def tools_section(tools: Tools) -> str:
    """What the model is told of the tools; nothing without any."""
    if not tools:
        return ""
    lines = [f"{_json(tool)}\n" for tool in tools]
    return INTRODUCTION + "".join(lines) + INSTRUCTIONS


def _under(chat: Sequence[_Message], role: str, section: str) -> list[_Message]:
    """The tools at the end of a system message, or before the first user's."""
    if not section:
        return list(chat)
    first = chat[0] if chat else None
    if role == "user":
        first = next((message for message in chat if message.data["role"] == role), None)
    elif first is not None and first.data["role"] not in ("system", "developer"):
        first = None
    if first is None:
        return [_Message({"role": role, "content": section}, ()), *chat]
    own = first.data["content"]
    both = (section, own) if role == "user" else (own, section)
    data = {**first.data, "content": APART.join(filter(None, both))}
    return [_Message(data, first.holds) if message is first else message for message in chat]


def _alternating(chat: Sequence[_Message]) -> list[_Message]:
    """Neighbours of one role as one message."""
    joined: list[_Message] = []
    for message in chat:
        last = joined[-1] if joined else None
        if last is not None and last.data["role"] == message.data["role"]:
            content = f"{last.data['content']}{APART}{message.data['content']}"
            data = {**last.data, "content": content}
            joined[-1] = _Message(data, last.holds + message.holds)
        else:
            joined.append(message)
    return joined


def _message(index: int, message: Mapping[str, Any]) -> _Message:
    """Raises PromptError for content that is not text."""
    content = message.get("content")
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise PromptError("A message's content must be text where tools are used.")
    data = {key: value for key, value in message.items() if key != "tool_calls"}
    data.setdefault("role", "")
    if message.get("role") == "tool":
        content = f"<tool_response>\n{content}\n</tool_response>"
        data = {"role": "user"}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, Sequence) or not all(isinstance(c, Mapping) for c in calls):
            raise PromptError("tool_calls must be a list of objects.")
        content = "\n".join(filter(None, (content, *map(_call, calls))))
    return _Message({**data, "content": content}, ((index, content),))


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        raise PromptError("A tool call's function must be an object.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # else as the model wrote it
            arguments = json.loads(arguments)
    shown: Data = {
        "name": function.get("name"),
        "arguments": {} if arguments is None else arguments,
    }
    return f"<tool_call>\n{_json(shown)}\n</tool_call>"


def _json(value: object) -> str:
    try:
        return json.dumps(plain(value), ensure_ascii=False)
    except RecursionError as error:
        raise PromptError("The messages are nested too deeply for the template.") from error


# -- where they lie ------------------------------------------------------------------------------


def _spans(message: _Message, span: Span, text: str) -> Iterator[Span]:
    """The span of a rendered message as those of the messages that it holds."""
    at = span.start
    for number, (index, content) in enumerate(message.holds):
        end = span.end
        if number + 1 < len(message.holds):
            found = text.find(content, at, span.end)
            if found < 0:  # the template trims it: the rest is this one's
                yield Span("message", index, at, span.end)
                return
            end = found + len(content)
        yield Span("message", index, at, end)
        at = end


def _tool_spans(tools: Tools, text: str) -> Iterator[Span]:
    at = text.find(tools_section(tools)) if tools else -1
    if at < 0:
        return
    at += len(INTRODUCTION)
    for index, tool in enumerate(tools):
        end = at + len(_json(tool)) + 1
        yield Span("tool", index, at, end)
        at = end
