"""Request bodies to chats: messages and tools as chat templates take them.

Known are a list of messages, an object with ``messages`` and ``tools``, and the bodies of OpenAI's
chat completions, responses and completions and of Anthropic's messages; which one it is, it shows
itself. Roles come out as ``system``, ``user``, ``assistant`` and ``tool``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvdb.errors import PromptError

Data = dict[str, Any]
ROLES = {"system": "system", "developer": "system"} | {
    role: role for role in ("user", "assistant", "tool")
}
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


@dataclass(frozen=True, slots=True)
class Chat:
    """What of a request body makes the prompt: a chat, or else a plain ``text``."""

    messages: tuple[Data, ...] | None = None
    tools: tuple[Data, ...] | None = None
    text: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def request(self) -> Data:
        """As keywords of :class:`engine.events.Request`."""
        given: Data = {"text": self.text} if self.messages is None else {"messages": self.messages}
        return {**given, "tools": self.tools, "template_options": self.template_options}


def read_body(text: str) -> Chat:
    """The chat in a JSON text. Raises PromptError in one sentence for anything else."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise PromptError(f"The request cannot be read as JSON: {error}.") from error
    except RecursionError as error:
        raise PromptError("The request is nested too deeply.") from error
    return parse_body(document)


def parse_body(document: object) -> Chat:
    """The chat in a parsed request body. Raises PromptError."""
    if isinstance(document, list):
        document = {"messages": document}
    if not isinstance(document, Mapping):
        raise PromptError("A request must be a JSON object, or a list of messages.")
    if "messages" in document:
        messages = (
            _anthropic_messages(document)
            if _is_anthropic(document)
            else [_message(item) for item in _list(document, "messages")]
        )
    elif "input" in document or "instructions" in document:
        messages = _response_messages(document)
    elif "prompt" in document:
        prompt = document["prompt"]
        if not isinstance(prompt, str):
            raise PromptError("A request's prompt must be one text.")
        if not prompt:
            raise PromptError("The prompt is empty.")
        return Chat(text=prompt)
    else:
        raise PromptError("The request has neither messages nor input nor prompt.")
    if not messages:
        raise PromptError("The prompt is empty.")
    tools = tuple(map(_tool, _list(document, "tools"))) if document.get("tools") else None
    options = document.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise PromptError("chat_template_kwargs must be an object.")
    return Chat(tuple(messages), tools, template_options=dict(options))


def _is_anthropic(document: Mapping[str, Any]) -> bool:
    if "system" in document or "anthropic_version" in document:
        return True
    tools = document.get("tools")
    if isinstance(tools, list) and any(isinstance(t, dict) and "input_schema" in t for t in tools):
        return True
    return any(
        isinstance(part, dict) and part.get("type") in ("tool_use", "tool_result", "thinking")
        for message in _list(document, "messages")
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


# -- OpenAI, and chats as templates take them ----------------------------------------------------


def _message(item: object) -> Data:
    """A chat message: content parts joined to one text, arguments of tool calls as objects."""
    message = dict(_object(item, "A message"))
    message["role"] = _role(message)
    if isinstance(message.get("content"), list):
        message["content"] = _joined(message["content"])
    elif message.get("content") is None:
        message["content"] = ""  # as mlx-lm's server has it: with tool calls OpenAI sends null
    elif not isinstance(message["content"], str):
        raise PromptError("A message's content must be text or a list of parts.")
    if message.get("tool_calls") is not None:
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise PromptError("tool_calls must be a list.")
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(item: object) -> Data:
    call = dict(_object(item, "A tool call"))
    if isinstance(call.get("function"), Mapping):
        function = dict(call["function"])
        function["arguments"] = _arguments(function.get("arguments"))
        call["function"] = function
    return call


def _arguments(value: object) -> object:
    """Arguments come as JSON in a string; templates write them as the object they are."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    return parsed if isinstance(parsed, dict) else value


def _tool(item: object) -> Data:
    """A tool as ``{"type": "function", "function": {name, description, parameters}}``."""
    tool = dict(_object(item, "A tool"))
    if "function" in tool:
        return tool
    if "input_schema" in tool:
        tool["parameters"] = tool.pop("input_schema")
    kept = ("name", "description", "parameters", "strict")
    if "parameters" not in tool or "name" not in tool:
        return tool  # one that the provider runs itself, or in a form of the template's own
    return {"type": "function", "function": {key: tool[key] for key in kept if key in tool}}


# -- OpenAI responses ----------------------------------------------------------------------------


def _response_messages(document: Mapping[str, Any]) -> list[Data]:
    messages: list[Data] = []
    instructions = document.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise PromptError("instructions must be text.")
        messages.append({"role": "system", "content": instructions})
    given = document.get("input", [])
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in _list(document, "input"):
        part = _object(item, "An input item")
        kind = part.get("type", "message")
        if kind == "message":
            messages.append(_message({"role": part.get("role"), "content": part.get("content")}))
        elif kind == "function_call":
            function = {"name": part.get("name"), "arguments": _arguments(part.get("arguments"))}
            call = {"type": "function", "id": part.get("call_id"), "function": function}
            if messages and messages[-1].get("tool_calls"):
                messages[-1]["tool_calls"].append(call)  # calls of one turn
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append(_tool_result(part.get("call_id"), part.get("output")))
        elif kind != "reasoning":  # its text stays with the provider
            raise PromptError(f"Input items of type {kind!r} cannot be turned into text.")
    return messages


# -- Anthropic -----------------------------------------------------------------------------------


def _anthropic_messages(document: Mapping[str, Any]) -> list[Data]:
    messages: list[Data] = []
    system = document.get("system")
    if system is not None:
        text = system if isinstance(system, str) else _joined(_list(document, "system"))
        messages.append({"role": "system", "content": text})
    for item in _list(document, "messages"):
        message = _object(item, "A message")
        role, content = _role(message), message.get("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif isinstance(content, list):
            messages += _anthropic_turn(role, content)
        else:
            raise PromptError("A message's content must be text or a list of parts.")
    return messages


def _anthropic_turn(role: str, content: Sequence[object]) -> list[Data]:
    """One turn: tool results are messages of their own, before what else the turn says."""
    results: list[Data] = []
    rest: list[object] = []
    calls: list[Data] = []
    thinking: list[str] = []
    for item in content:
        part = _object(item, "A content part")
        kind = part.get("type")
        if kind == "tool_result":
            results.append(_tool_result(part.get("tool_use_id"), part.get("content", "")))
        elif kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input")}
            calls.append({"type": "function", "id": part.get("id"), "function": function})
        elif kind == "thinking":
            thinking.append(str(part.get("thinking", "")))
        elif kind != "redacted_thinking":
            rest.append(part)
    if not (rest or calls or thinking):
        return results
    message: Data = {"role": role, "content": _joined(rest)}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


# -- what they share -----------------------------------------------------------------------------


def _tool_result(call_id: object, output: object) -> Data:
    content = _joined(output) if isinstance(output, list) else str(output)
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _joined(parts: Sequence[object]) -> str:
    texts = []
    for item in parts:
        if isinstance(item, str):
            texts.append(item)
            continue
        part = _object(item, "A content part")
        kind = part.get("type")
        text = part.get("text", part.get("refusal"))
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise PromptError(
                f"Content of type {kind!r} cannot be explained or run: only text has token ids "
                "here."
            )
        texts.append(text)
    return "".join(texts)


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise PromptError(f"A message's role must be one of {', '.join(ROLES)}, not {role!r}.")
    return ROLES[role]


def _object(item: object, what: str) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        raise PromptError(f"{what} must be a JSON object.")
    return item


def _list(document: Mapping[str, Any], key: str) -> list[object]:
    value = document.get(key)
    if not isinstance(value, list):
        raise PromptError(f"{key} must be a list.")
    return value
