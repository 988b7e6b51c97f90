"""Request bodies: every dialect of one conversation gives one chat; anything else, one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.prompt.bodies import parse_body, read_body
from kvdb.errors import PromptError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"name": "weather", "arguments": {"city": "Wien"}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Wien?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "c1", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3 degrees"},
    {"role": "user", "content": "Thanks."},
]
TOOLS = (
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tells", "parameters": SCHEMA},
    },
)
BODIES: dict[str, dict[str, Any]] = {
    "chat completions": {
        "model": "m",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            MESSAGES[1],
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "type": "function",
                        "id": "c1",
                        "function": {**CALL, "arguments": json.dumps(CALL["arguments"])},
                    }
                ],
            },
            MESSAGES[3],
            MESSAGES[4],
        ],
        "tools": list(TOOLS),
    },
    "responses": {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather in Wien?"}]},
            {"type": "reasoning", "summary": []},
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "weather",
                "arguments": json.dumps(CALL["arguments"]),
            },
            {"type": "function_call_output", "call_id": "c1", "output": "3 degrees"},
            {"type": "message", "role": "user", "content": "Thanks."},
        ],
        "tools": [
            {"type": "function", "name": "weather", "description": "Tells", "parameters": SCHEMA}
        ],
    },
    "anthropic messages": {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            MESSAGES[1],
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Wien"}}
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "3 degrees"}],
                    },
                    {"type": "text", "text": "Thanks."},
                ],
            },
        ],
        "tools": [{"name": "weather", "description": "Tells", "input_schema": SCHEMA}],
    },
}


@pytest.mark.parametrize("dialect", BODIES)
def test_a_conversation_is_the_same_in_every_dialect(dialect: str) -> None:
    chat = read_body(json.dumps(BODIES[dialect]))
    assert chat.messages is not None
    assert list(chat.messages) == MESSAGES
    assert chat.tools == TOOLS


def test_plain_forms() -> None:
    assert parse_body(MESSAGES).messages == tuple(MESSAGES)
    assert parse_body({"prompt": "Once"}).text == "Once"
    called = {"role": "assistant", "content": None, "tool_calls": []}  # as OpenAI sends it
    assert parse_body([called]).messages == ({**called, "content": ""},)
    assert parse_body({"input": "Hi"}).messages == ({"role": "user", "content": "Hi"},)
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    answer = {"role": "assistant", "content": [thinking, {"type": "text", "text": "Yes."}]}
    (message,) = parse_body([answer]).messages or ()
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    options = parse_body({"messages": MESSAGES, "chat_template_kwargs": {"a": 1}})
    assert options.template_options == {"a": 1}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}}
REFUSED: dict[str, str] = {
    "nothing": "",
    "cut short": json.dumps(BODIES["responses"])[:150],
    "a number": "7",
    "null": "null",
    "no messages": "{}",
    "empty messages": '{"messages": []}',
    "messages that are none": '{"messages": {"role": "user"}}',
    "a message that is text": '["hello"]',
    "no role": '[{"content": "x"}]',
    "a wrong role": '[{"role": "root", "content": "x"}]',
    "a role that is a list": '[{"role": ["user"], "content": "x"}]',
    "content that is a number": '[{"role": "user", "content": 7}]',
    "an image": json.dumps([{"role": "user", "content": [IMAGE]}]),
    "an image of anthropic's": json.dumps(
        {"system": "s", "messages": [{"role": "user", "content": [{"type": "image"}]}]}
    ),
    "an audio part": json.dumps(
        {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}
    ),
    "an unknown input item": '{"input": [{"type": "computer_call"}]}',
    "several prompts": '{"prompt": ["a", "b"]}',
    "tools that are none": '{"messages": [{"role": "user", "content": "x"}], "tools": "all"}',
    "options that are none": (
        '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 1}'
    ),
    "deeper than any": "[" * 100_000,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_request_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(PromptError) as caught:
        read_body(REFUSED[name])
    assert str(caught.value).endswith((".", ")."))
    assert len(str(caught.value)) < 300
