"""Request bodies to chats: messages and tools as chat templates take them.

Known are a list of messages, an object with ``messages`` and ``tools``, and the bodies of OpenAI's
chat completions, responses and completions and of Anthropic's messages; which one it is, it shows
itself. Roles come out as ``system``, ``user``, ``assistant`` and ``tool``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.prompt.anthropic import anthropic_messages
from engine.prompt.parts import Data, arguments_of, joined, list_of, object_of, role_of, tool_of
from engine.prompt.responses import responses_messages
from kvdb.errors import PromptError


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
            anthropic_messages(document)[0]
            if _is_anthropic(document)
            else [_message(item) for item in list_of(document, "messages")]
        )
    elif "input" in document or "instructions" in document:
        messages = responses_messages(document)
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
    tools = tuple(map(tool_of, list_of(document, "tools"))) if document.get("tools") else None
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
        for message in list_of(document, "messages")
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


# -- OpenAI, and chats as templates take them ----------------------------------------------------


def _message(item: object) -> Data:
    """A chat message: content parts joined to one text, arguments of tool calls as objects."""
    message = dict(object_of(item, "A message"))
    message["role"] = role_of(message)
    if isinstance(message.get("content"), list):
        message["content"] = joined(message["content"])
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
    call = dict(object_of(item, "A tool call"))
    if isinstance(call.get("function"), Mapping):
        function = dict(call["function"])
        function["arguments"] = arguments_of(function.get("arguments"))
        call["function"] = function
    return call
