"""Bodies of OpenAI's responses: their instructions and input items to chats as templates take
them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from engine.prompt.parts import (
    Data,
    call_of,
    joined,
    list_of,
    object_of,
    role_of,
    tool_result,
)
from kvdb.errors import PromptError

# Encrypted content of ours: who keeps no responses here sends back by it what the model thought.
OWN = "kvdb1."


def responses_messages(document: Mapping[str, Any]) -> list[Data]:
    """The messages of a body. Reasoning, text and calls that follow each other are one message, as
    the model wrote them. Raises PromptError."""
    messages: list[Data] = []
    instructions = document.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise PromptError("instructions must be text.")
        messages.append({"role": "system", "content": instructions})
    given = document.get("input", [])
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    thinking = ""  # of the message that follows
    for item in list_of(document, "input"):
        part = object_of(item, "An input item")
        kind = part.get("type", "message")
        if kind == "reasoning":
            thinking += _thinking(part)
            continue
        if kind == "message":
            message: Data = {"role": role_of(part), "content": _content(part.get("content"))}
        elif kind in ("function_call", "custom_tool_call"):
            call = _call(part, custom=kind == "custom_tool_call")
            if messages and messages[-1]["role"] == "assistant" and not thinking:
                messages[-1].setdefault("tool_calls", []).append(call)
                continue
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        elif kind in ("function_call_output", "custom_tool_call_output"):
            message = tool_result(part.get("call_id"), part.get("output"))
        else:
            raise PromptError(f"Input items of type {kind!r} cannot be turned into text.")
        if thinking and message["role"] == "assistant":
            message["reasoning_content"] = thinking
        thinking = ""
        messages.append(message)
    return messages


def shown_name(name: object, namespace: object) -> str:
    """What a tool in a namespace is called in prompts."""
    return f"{namespace}__{name}" if namespace else str(name)


def _call(part: Mapping[str, Any], *, custom: bool) -> Data:
    name = shown_name(part.get("name"), part.get("namespace"))
    arguments = {"input": part.get("input")} if custom else part.get("arguments")
    return call_of(part.get("call_id"), name, arguments)


def _content(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise PromptError("A message's content must be text or a list of parts.")
    return joined(content)


def seal(thinking: str) -> str:
    """Reasoning as the opaque text that clients send back."""
    return OWN + base64.b64encode(thinking.encode("utf-8", "surrogatepass")).decode()


def _thinking(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item, if it is one that can be read."""
    content = item.get("content")
    if isinstance(content, list) and content:
        return joined(content)
    sealed = item.get("encrypted_content")
    if not isinstance(sealed, str) or not sealed.startswith(OWN):
        return ""  # its text stays with the provider
    try:
        return base64.b64decode(sealed.removeprefix(OWN), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise PromptError("encrypted_content is not what this server gave.") from error
