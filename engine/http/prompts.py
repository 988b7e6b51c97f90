"""A prompt in a body of kvdb's own routes: messages, text or token ids."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from engine.events import Request
from engine.prompt.bodies import parse_body
from kvdb.errors import UsageError

# What fits the store's numbers.
RowId = Annotated[int, Field(ge=0, lt=1 << 63)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]


class PromptFields(BaseModel):
    """Exactly one of ``messages`` (as in a chat, with ``tools``), ``prompt`` and ``tokens``."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt: str | None = None
    tokens: list[TokenId] | None = None


def prompt_of(fields: PromptFields, **more: Any) -> Request | None:
    """The engine's request with that prompt, and ``more`` of its fields; None without a prompt.
    Raises UsageError."""
    given = [fields.messages, fields.prompt, fields.tokens]
    if all(one is None for one in given):
        return None
    if sum(one is not None for one in given) > 1:
        raise UsageError("Give one of messages, prompt and tokens.")
    if fields.messages is None:
        return Request(text=fields.prompt, tokens=fields.tokens, **more)
    chat = parse_body(
        {
            "messages": fields.messages,
            "tools": fields.tools,
            "chat_template_kwargs": fields.chat_template_kwargs or {},
        }
    )
    return Request(**chat.request(), **more)
