"""Bodies of Anthropic's messages: to chats as templates take them, and where cache_control marks
lie in these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.events import Mark
from engine.prompt.parts import Data, call_of, list_of, object_of, role_of, text_of, tool_result
from kvdb.errors import PromptError

TTL_SECONDS = {"5m": 300.0, "1h": 3600.0}
MAX_MARKS = 4
# Claude Code puts its version and a checksum that changes with each request before the system
# prompt, for who bills it. As prompt text it would make every prompt differ at its first line.
BILLING = "x-anthropic-billing-header:"
REMINDER = "<system-reminder>\n{}\n</system-reminder>"


def anthropic_messages(
    document: Mapping[str, Any], *, fold_system: bool = False
) -> tuple[list[Data], list[Mark]]:
    """The messages of a body, and its marks. ``fold_system``: system text in midst of the
    conversation becomes a part of the user's turn before it, as Claude Code writes reminders.
    Raises PromptError."""
    messages: list[Data] = []
    tools = document.get("tools")
    marks = [
        Mark(index, ttl, tool=True)
        for index, tool in enumerate(tools if isinstance(tools, list) else ())
        if isinstance(tool, Mapping) and (ttl := _ttl(tool)) is not None
    ]
    system = document.get("system")
    if system is not None:
        parts = [system] if isinstance(system, str) else list_of(document, "system")
        parts = [part for part in parts if not text_of(part).startswith(BILLING)]
        if parts:
            _add(messages, marks, "system", parts)
    turns = [object_of(item, "A message") for item in list_of(document, "messages")]
    for turn in _folded(turns) if fold_system else turns:
        _add(messages, marks, role_of(turn), _parts(turn))
    if messages and (ttl := _ttl(document)) is not None:
        marks.append(Mark(len(messages) - 1, ttl))
    if len(marks) > MAX_MARKS:
        raise PromptError(f"At most {MAX_MARKS} cache_control marks may be set, not {len(marks)}.")
    return messages, marks


def _add(messages: list[Data], marks: list[Mark], role: str, parts: Sequence[object]) -> None:
    """Add one turn: tool results are messages of their own, before what else the turn says."""
    rest: list[Mapping[str, Any]] = []
    for item in parts:
        part = {"type": "text", "text": item} if isinstance(item, str) else item
        part = object_of(part, "A content part")
        if part.get("type") != "tool_result":
            rest.append(part)
            continue
        if (ttl := _ttl(part)) is not None:
            marks.append(Mark(len(messages), ttl))
        messages.append(tool_result(part.get("tool_use_id"), part.get("content", "")))
    if not rest and parts:
        return
    text, thinking, calls = "", "", []
    for number, part in enumerate(rest):
        kind = part.get("type")
        if kind == "tool_use":
            calls.append(call_of(part.get("id"), part.get("name"), part.get("input")))
        elif kind == "thinking":
            thinking += str(part.get("thinking", ""))
        elif kind != "redacted_thinking":  # it can be read by its provider only
            text += text_of(part)
        if (ttl := _ttl(part)) is not None:
            inside = kind == "text" and number + 1 < len(rest)
            marks.append(Mark(len(messages), ttl, characters=len(text) if inside else None))
    if parts and not (text or thinking or calls or any(p.get("type") == "text" for p in rest)):
        return  # nothing of it can be read here
    message: Data = {"role": role, "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    messages.append(message)


def _folded(turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    folded: list[Mapping[str, Any]] = []
    for turn in turns:
        role, parts = role_of(turn), _parts(turn)
        if role == "system":
            role = "user"
            parts = [_reminder(part) for part in parts]
        if role == "user" and folded and folded[-1]["role"] == "user":
            folded[-1] = {"role": role, "content": [*folded[-1]["content"], *parts]}
        else:
            folded.append({"role": role, "content": parts})
    return folded


def _reminder(part: object) -> Data:
    own = {"type": "text"} if isinstance(part, str) else dict(object_of(part, "A content part"))
    return {**own, "text": "\n" + REMINDER.format(text_of(part).strip())}


def _parts(turn: Mapping[str, Any]) -> list[object]:
    content = turn.get("content")
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise PromptError("A message's content must be text or a list of parts.")
    return content


def _ttl(part: Mapping[str, Any]) -> float | None:
    """For how long what lies before the end of a part is to be kept."""
    control = part.get("cache_control")
    if control is None:
        return None
    ttl = object_of(control, "cache_control").get("ttl")
    kind = control.get("type")
    if kind != "ephemeral" or not (ttl is None or (isinstance(ttl, str) and ttl in TTL_SECONDS)):
        raise PromptError("cache_control must be of type ephemeral, with a ttl of 5m or 1h.")
    return TTL_SECONDS["5m" if ttl is None else ttl]
