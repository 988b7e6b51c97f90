"""What request bodies of all APIs are made of: roles, content parts, tools, results of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvdb.errors import PromptError

Data = dict[str, Any]
ROLES = {"system": "system", "developer": "system"} | {
    role: role for role in ("user", "assistant", "tool")
}
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")


def arguments_of(value: object) -> object:
    """Arguments come as JSON in a string; templates write them as the object they are."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


def tool_of(item: object) -> Data:
    """A tool as ``{"type": "function", "function": {name, description, parameters}}``."""
    tool = dict(object_of(item, "A tool"))
    if "function" in tool:
        return tool
    if "input_schema" in tool:
        tool["parameters"] = tool.pop("input_schema")
    kept = ("name", "description", "parameters", "strict")
    if "parameters" not in tool or "name" not in tool:
        return tool  # one that the provider runs itself, or in a form of the template's own
    return {"type": "function", "function": {key: tool[key] for key in kept if key in tool}}


def call_of(id_: object, name: object, arguments: object) -> Data:
    function = {"name": name, "arguments": arguments_of(arguments)}
    return {"type": "function", "id": id_, "function": function}


def tool_result(call_id: object, output: object) -> Data:
    content = joined(output) if isinstance(output, list) else str(output or "")
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def joined(parts: Sequence[object]) -> str:
    """The text of content parts. Raises PromptError for what is not text."""
    return "".join(map(text_of, parts))


def text_of(item: object) -> str:
    if isinstance(item, str):
        return item
    part = object_of(item, "A content part")
    kind = part.get("type")
    text = part.get("text", part.get("refusal"))
    if kind not in TEXT_PARTS or not isinstance(text, str):
        raise PromptError(
            f"Content of type {kind!r} cannot be explained or run: only text has token ids here."
        )
    return text


def role_of(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise PromptError(f"A message's role must be one of {', '.join(ROLES)}, not {role!r}.")
    return ROLES[role]


def object_of(item: object, what: str) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        raise PromptError(f"{what} must be a JSON object.")
    return item


def list_of(document: Mapping[str, Any], key: str) -> list[object]:
    value = document.get(key)
    if not isinstance(value, list):
        raise PromptError(f"{key} must be a list.")
    return value
