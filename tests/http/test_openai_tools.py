"""Tools, reasoning and guided answers: what the model writes, as OpenAI's API tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_model import tool

from tests.http.conftest import Running, StartServer
from tests.http.scripts import Script

TOOLS = [tool("search"), tool("read_file", path="Which file")]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "été", "limit": 3}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.txt"}}\n</tool_call>'
USER = {"role": "user", "content": "What is the weather of the city?"}
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def script(chat_folder: Path) -> Script:
    return Script(chat_folder)


@pytest.fixture(scope="module")
def scripted(start: StartServer, script: Script) -> Running:
    return start(adapt=script, max_tokens=400)


@pytest.fixture(autouse=True)
def _unscripted(script: Script) -> Iterator[None]:
    yield
    script.text = None


def both(server: Running, **more: Any) -> dict[str, Any]:
    """The message of an answer, which the stream must agree with."""
    create = server.client.chat.completions.create
    body = {"model": "tiny", "messages": [USER], **more}
    whole = create(**body).choices[0]
    text, thoughts, calls, reason = "", "", {}, None
    for chunk in create(stream=True, **body):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        thoughts += getattr(choice.delta, "reasoning_content", None) or ""
        reason = choice.finish_reason or reason
        for part in choice.delta.tool_calls or []:
            call = calls.setdefault(part.index, {"name": part.function.name, "arguments": ""})
            call["arguments"] += part.function.arguments
    message = whole.message
    told = [
        {"name": call.function.name, "arguments": call.function.arguments}
        for call in message.tool_calls or []
    ]
    assert (text, list(calls.values()), reason) == (
        message.content or "",
        told,
        whole.finish_reason,
    )
    assert thoughts == (getattr(message, "reasoning_content", None) or "")
    return {"text": text, "thoughts": thoughts, "calls": told, "reason": reason}


@pytest.mark.parametrize(
    ("text", "said", "thoughts", "names"),
    [
        ("It is warm.", "It is warm.", "", []),
        (CALL, "", "", ["search"]),
        (f"Let me look.\n{CALL}\n{OTHER}", "Let me look.", "", ["search", "read_file"]),
        (f"<think>\nHm, the city.\n</think>\n{CALL}", "", "Hm, the city.", ["search"]),
        ("<think>\nHm.\n</think>\n\nIt is warm.", "It is warm.", "Hm.", []),
        ("A <tool_call> is not", "A <tool_call> is not", "", []),
        ("<tool_call>\n{broken\n</tool_call>", "<tool_call>\n{broken\n</tool_call>", "", []),
    ],
)
def test_an_answer_is_told_by_its_parts(
    scripted: Running, script: Script, text: str, said: str, thoughts: str, names: list[str]
) -> None:
    script.text = text
    told = both(scripted, tools=TOOLS)
    assert [call["name"] for call in told["calls"]] == names
    assert (told["text"], told["thoughts"]) == (said, thoughts)
    assert told["reason"] == ("tool_calls" if names else "stop")
    if "search" in names:
        assert json.loads(told["calls"][0]["arguments"]) == {"query": "été", "limit": 3}


def test_without_tools_a_call_is_text(scripted: Running, script: Script) -> None:
    script.text = CALL
    assert both(scripted)["text"] == CALL
    assert both(scripted, tools=TOOLS, tool_choice="none")["text"] == CALL


def test_a_call_and_its_result_go_back(scripted: Running, script: Script) -> None:
    create = scripted.client.chat.completions.create
    script.text = f"Let me look.\n{CALL}"
    first = create(model="tiny", messages=[USER], tools=TOOLS)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "22 degrees"}
    script.text = "It is warm."
    messages = [USER, message.model_dump(exclude_none=True), result]
    second = create(model="tiny", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "It is warm."
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"search", "read_file"}),
        ({"type": "function", "function": {"name": "read_file"}}, {"read_file"}),
    ],
)
def test_a_model_is_made_to_call(scripted: Running, choice: Any, names: set[str]) -> None:
    """A random model, which has no idea of calls."""
    told = both(
        scripted,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=1.0,
        seed=4,
        logit_bias={"1": -5},
    )
    if told["reason"] == "length":  # its arguments need not come to an end
        assert told["text"].startswith("<tool_call>")
        return
    assert {call["name"] for call in told["calls"]} <= names
    assert len(told["calls"]) == 1
    assert json.loads(told["calls"][0]["arguments"]).keys() >= {"path"} - (names - {"read_file"})


def test_an_answer_is_json_by_a_schema(scripted: Running) -> None:
    for seed in range(2):
        told = both(
            scripted,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "place", "schema": PLACE, "strict": True},
            },
            temperature=1.0,
            seed=seed,
        )
        place = json.loads(told["text"])
        assert place["city"] in ("Paris", "Rome")
        assert isinstance(place["warm"], bool)
        assert told["reason"] == "stop"
    assert both(scripted, response_format={"type": "json_object"})["text"].startswith("{")


def test_what_must_be_json_may_be_a_call(scripted: Running, script: Script) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    script.text = OTHER
    told = both(scripted, tools=TOOLS, response_format=form)
    assert [call["name"] for call in told["calls"]] == ["read_file"]
    script.text = '{"city": "Rome", "warm": true}'
    assert both(scripted, tools=TOOLS, response_format=form)["text"] == script.text
    script.text = None
    told = both(scripted, tools=TOOLS, response_format=form, temperature=1.0, seed=1)
    assert told["calls"] or told["text"][0] in "{<"


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nothing"}},
                }
            },
            "schema",
        ),
        ({"tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "delete"}},
            },
            "delete",
        ),
    ],
)
def test_what_cannot_be_asked_is_said(scripted: Running, more: dict[str, Any], word: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=word):
            scripted.client.chat.completions.create(
                model="tiny", messages=[USER], stream=stream, **more
            )
