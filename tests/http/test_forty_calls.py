"""Forty calls of each official client, each asked whole and as a stream: both say the same, what
they say fits what was asked, and the usage adds up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from chat_model import tool

from tests.http.conftest import Running, StartServer
from tests.http.dialects import DIALECTS, Told
from tests.http.scripts import Script

LONG = "The quick brown fox jumps over the lazy dog. " * 4
USER: dict[str, Any] = {"role": "user", "content": LONG}
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = [tool("search"), tool("read_file", path="Which file")]
FLAT = [{"type": "function", **each["function"]} for each in FUNCTIONS]
TOOLS = [
    {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
    for each in FLAT
]
QUERY = {"query": "été", "limit": "3"}
SEARCH = """<tool_call>
{"name": "search", "arguments": {"query": "été", "limit": "3"}}
</tool_call>"""
READ = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.txt"}}\n</tool_call>'
SEARCHED, READ_IT = ("search", QUERY), ("read_file", {"path": "a.txt"})
THOUGHT = "<think>\nHm.\n</think>\n\n"
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
PICTURE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}
MARKED = {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}


@dataclass(frozen=True)
class Call:
    """What is asked, what the model says to it (by itself where that is None), and what must be
    true of the answer; or the error, and a word that it says."""

    dialect: str
    name: str
    body: dict[str, Any]
    fits: Callable[[Told], Any] | None = None
    says: str | None = None
    error: tuple[type[Exception], str] | None = None

    def __str__(self) -> str:
        return f"{self.dialect}-{self.name}"


def full(told: Told) -> bool:
    """As long as it may be."""
    return set(told.ends) <= {"length", "max_tokens", "incomplete"} and all(told.texts)


def place(told: Told) -> bool:
    return json.loads(told.texts[0])["city"] in ("Paris", "Rome")


def said(text: str, *calls: Any, thoughts: str = "") -> Callable[[Told], bool]:
    return lambda told: (told.texts, told.calls, told.thoughts) == ([text], [*calls], thoughts)


BAD, NONE = openai.BadRequestError, openai.NotFoundError
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "22 degrees"}
CALLED = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "search", "arguments": json.dumps(QUERY)},
        }
    ],
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
NAMED = {"type": "function", "function": {"name": "read_file"}}
TURNS = [USER, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And now?"}]
CHATS = [
    Call("chat", "plain", {}, full),
    Call("chat", "system", {"messages": [{"role": "system", "content": "Be short."}, USER]}, full),
    Call("chat", "turns", {"messages": TURNS}, full),
    Call("chat", "sampled", {"temperature": 0.9, "top_p": 0.9, "seed": 5}, full),
    Call("chat", "n", {"n": 3, "temperature": 0.9, "seed": 5}, lambda t: len(set(t.texts)) > 1),
    Call("chat", "most", {"max_completion_tokens": 3}, lambda t: t.generated == 3),
    Call("chat", "stop", {"stop": "STOP"}, said("One "), "One STOP two"),
    Call("chat", "stops", {"stop": ["x", "two"]}, said("One STOP "), "One STOP two"),
    Call("chat", "logprobs", {"logprobs": True}, lambda t: len(t.logprobs[0]) == t.generated),
    Call("chat", "penalties", {"presence_penalty": 1.5, "frequency_penalty": 0.5}, full),
    Call("chat", "bias", {"logit_bias": {"40": 100}}, lambda t: len(set(t.texts[0])) == 1),
    Call("chat", "JSON", {"response_format": {"type": "json_object"}}, place, '{"city": "Rome"}'),
    Call("chat", "schema", {"response_format": SCHEMA}, place),
    Call("chat", "tools, none used", {"tools": FUNCTIONS}, said("Warm."), "Warm."),
    Call("chat", "tool", {"tools": FUNCTIONS}, said("", SEARCHED), SEARCH),
    Call(
        "chat",
        "tools",
        {"tools": FUNCTIONS},
        said("So.", SEARCHED, READ_IT),
        f"So.\n{SEARCH}\n{READ}",
    ),
    Call(
        "chat",
        "thought",
        {"tools": FUNCTIONS},
        said("", READ_IT, thoughts="Hm."),
        THOUGHT + READ,
    ),
    Call("chat", "no tool", {"tools": FUNCTIONS, "tool_choice": "none"}, said(READ), READ),
    Call("chat", "that tool", {"tools": FUNCTIONS, "tool_choice": NAMED}, said("", READ_IT), READ),
    Call("chat", "result", {"messages": [USER, CALLED, RESULT], "tools": FUNCTIONS}, full),
    Call("chat", "no model", {"model": "gpt-4"}, error=(NONE, "not served")),
    Call("chat", "no message", {"messages": []}, error=(BAD, "empty")),
    Call("chat", "picture", {"messages": [{**USER, "content": [IMAGE]}]}, error=(BAD, "image_url")),
    Call("chat", "too hot", {"temperature": -1}, error=(BAD, "temperature")),
]
PROMPTS = [
    Call("completions", "plain", {}, full),
    Call("completions", "two", {"prompt": [LONG, "The city"], "n": 2}, lambda t: len(t.texts) == 4),
    Call("completions", "tokens", {"prompt": [40, 41, 42, 43]}, lambda t: t.prompt == 4),
    Call("completions", "echo", {"echo": True}, lambda t: t.texts[0].startswith(LONG)),
    Call("completions", "stop", {"stop": "STOP"}, said("One "), "One STOP two"),
    Call("completions", "logprobs", {"logprobs": 2}, lambda t: len(t.logprobs[0]) == t.generated),
    Call("completions", "no prompt", {"prompt": ""}, error=(BAD, "empty")),
]
ITEMS = [{"role": "user", "content": [{"type": "input_text", "text": LONG}]}]
FORM = {"format": {"type": "json_schema", "name": "place", "schema": PLACE, "strict": True}}
INPUTS = [
    Call("responses", "plain", {}, full),
    Call("responses", "items", {"input": ITEMS, "instructions": "Be short."}, full),
    Call("responses", "sampled", {"temperature": 0.9, "top_p": 0.9}, lambda t: t.generated > 0),
    Call("responses", "tool", {"tools": FLAT}, said("So.", SEARCHED), f"So.\n{SEARCH}"),
    Call("responses", "thought", {}, said("Yes.", thoughts="Hm."), f"{THOUGHT}Yes."),
    Call("responses", "schema", {"text": FORM}, place),
    Call("responses", "not kept", {"store": False}, full),
    Call("responses", "no model", {"model": "gpt-4"}, error=(NONE, "not served")),
    Call("responses", "no such one", {"previous_response_id": "x"}, error=(BAD, "not kept")),
]
OPENAI = [*CHATS, *PROMPTS, *INPUTS]

WRONG, UNKNOWN = anthropic.BadRequestError, anthropic.NotFoundError
USE = {"type": "tool_use", "id": "t1", "name": "search", "input": QUERY}
DONE = {"type": "tool_result", "tool_use_id": "t1", "content": "22 degrees"}
WENT = [
    USER,
    {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE]},
    {"role": "user", "content": [DONE]},
]
FAILED = [*WENT[:2], {"role": "user", "content": [{**DONE, "is_error": True}]}]
BLOCK = {"type": "text", "text": "Be short."}
SHAPE = {"format": {"type": "json_schema", "schema": PLACE}}
REMINDER = {"role": "system", "content": "Answer in French."}
ANY, NOT = {"type": "any"}, {"type": "none"}
THIS = {"type": "tool", "name": "read_file"}
TEXTS = {**USER, "content": [{"type": "text", "text": LONG}, BLOCK]}


def sampled(**given: Any) -> dict[str, Any]:
    """What the client no longer has names for."""
    return {"extra_body": given}


def asking(*parts: Any) -> dict[str, Any]:
    return {"messages": [{**USER, "content": list(parts)}]}


ANTHROPIC = [
    Call("messages", name, body, fits, says)
    for name, body, fits, says in [
        ("plain", {}, full, None),
        ("system", {"system": "Be short."}, full, None),
        ("blocks", {"system": [BLOCK, BLOCK]}, full, None),
        ("marked system", {"system": [MARKED]}, full, None),
        ("marked text", {"messages": [{**USER, "content": [MARKED]}]}, full, None),
        (
            "marked tools",
            {"tools": [{**TOOLS[0], "cache_control": MARKED["cache_control"]}]},
            full,
            None,
        ),
        ("texts", {"messages": [TEXTS]}, full, None),
        ("turns", {"messages": TURNS}, full, None),
        ("reminder", {"messages": [USER, REMINDER]}, full, None),
        ("greedy", sampled(temperature=0.0), full, None),
        ("one of one", sampled(temperature=0.9, top_k=1), full, None),
        ("tiny nucleus", sampled(temperature=0.9, top_p=1e-6), full, None),
        ("most", {"max_tokens": 3}, lambda t: t.generated == 3, None),
        ("stop", {"stop_sequences": ["STOP"]}, lambda t: t.ends == ["STOP"], "One STOP two"),
        ("stops", {"stop_sequences": ["x", "two"]}, said("One STOP "), "One STOP two"),
        ("no stop", {"stop_sequences": ["x"]}, lambda t: t.ends == ["end_turn"], "One two"),
        ("schema", {"output_config": SHAPE}, place, None),
        ("schema, played", {"output_config": SHAPE}, place, '{"city": "Rome"}'),
        ("tools, none used", {"tools": TOOLS}, said("Warm."), "Warm."),
        ("tool", {"tools": TOOLS}, said("", SEARCHED), SEARCH),
        ("tools", {"tools": TOOLS}, said("So.", SEARCHED, READ_IT), f"So.\n{SEARCH}\n{READ}"),
        ("thought", {}, said("Yes.", thoughts="Hm."), f"{THOUGHT}Yes."),
        ("thought, tool", {"tools": TOOLS}, said("", READ_IT, thoughts="Hm."), THOUGHT + READ),
        ("any tool", {"tools": TOOLS, "tool_choice": ANY}, said("", SEARCHED), SEARCH),
        ("that tool", {"tools": TOOLS, "tool_choice": THIS}, said("", READ_IT), READ),
        ("no tool", {"tools": TOOLS, "tool_choice": NOT}, said(READ), READ),
        ("result", {"tools": TOOLS, "messages": WENT}, full, None),
        ("failed", {"tools": TOOLS, "messages": FAILED}, said("So."), "So."),
        ("whose", {"metadata": {"user_id": "u"}}, full, None),
        ("no thinking", {"thinking": {"type": "disabled"}}, full, None),
    ]
] + [
    Call("messages", name, body, error=(kind, word))
    for name, body, kind, word in [
        ("no model", {"model": "claude-opus-4-8"}, UNKNOWN, "not served"),
        ("no message", {"messages": []}, WRONG, "empty"),
        ("no room", {"max_tokens": 0}, WRONG, "max_tokens"),
        ("too hot", sampled(temperature=-1), WRONG, "temperature"),
        ("picture", asking(PICTURE), WRONG, "image"),
        ("robot", {"messages": [{**USER, "role": "robot"}]}, WRONG, "role"),
        ("too many marks", asking(*[MARKED] * 5), WRONG, "cache_control"),
        ("tool without tools", {"tool_choice": ANY}, WRONG, "tools"),
        ("unknown tool", {"tools": TOOLS, "tool_choice": {**THIS, "name": "x"}}, WRONG, "x"),
        ("nothing to stop at", {"stop_sequences": [""]}, WRONG, "stop"),
    ]
]
GIVEN: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER]},
    "completions": {"prompt": LONG},
    "responses": {"input": LONG},
    "messages": {"messages": [USER], "max_tokens": 120},
}
MOST = {"responses": "max_output_tokens"}  # elsewhere max_tokens


def test_there_are_forty_of_each() -> None:
    assert len(OPENAI) == len(ANTHROPIC) == 40


@pytest.fixture(scope="module")
def script(chat_folder: Path) -> Script:
    return Script(chat_folder)


@pytest.fixture(scope="module")
def server(start: StartServer, script: Script) -> Running:
    return start(adapt=script, max_tokens=120)


@pytest.fixture(autouse=True)
def _unscripted(script: Script) -> Iterator[None]:
    yield
    script.text = None


@pytest.mark.parametrize("call", [*OPENAI, *ANTHROPIC], ids=str)
def test_a_call_is_answered_whole_and_as_a_stream(
    server: Running, script: Script, call: Call
) -> None:
    script.text = call.says
    given = GIVEN[call.dialect]
    if call.says is None and call.fits is not place:
        given = {**given, MOST.get(call.dialect, "max_tokens"): 8}
    body = {"model": "tiny", **given, **call.body}
    asks = DIALECTS[call.dialect]
    if call.error is not None:
        for ask in asks:
            with pytest.raises(call.error[0], match=call.error[1]):
                ask(server.url, body)
        return
    whole, streamed = (ask(server.url, body) for ask in asks)
    assert call.fits is not None
    assert call.fits(whole), whole
    if call.dialect != "responses" or "temperature" not in body:  # which has no seed
        assert streamed.said() == whole.said()
    for told in (whole, streamed):
        assert 0 <= told.cached <= told.prompt
    # History has a row an answer, and a prompt that has several counts for each.
    n = body.get("n", 1)
    assert server.store is not None
    assert server.store.flush(30)
    rows = server.store.sql(
        "SELECT prompt_tokens, restored_tokens, generated_tokens FROM requests ORDER BY id DESC"
    ).rows[: len(whole.texts) + len(streamed.texts)]
    prompt, cached, generated = (sum(column) for column in zip(*rows, strict=True))
    assert prompt == n * (whole.prompt + streamed.prompt)
    assert generated == whole.generated + streamed.generated
    assert n > 1 or cached == whole.cached + streamed.cached
