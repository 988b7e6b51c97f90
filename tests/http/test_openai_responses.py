"""OpenAI's responses through the official client: streams, conversations, what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.http.conftest import Running, StartServer
from tests.http.scripts import Script

LONG = "The quick brown fox jumps over the lazy dog. " * 8
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
    {"type": "function", "name": "now"},
    {"type": "web_search"},
]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "été"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
QUESTION = "What is the weather of the city?"
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def script(chat_folder: Path) -> Script:
    return Script(chat_folder)


@pytest.fixture(scope="module")
def server(start: StartServer, script: Script) -> Running:
    return start(adapt=script)


@pytest.fixture(autouse=True)
def _unscripted(script: Script) -> Iterator[None]:
    yield
    script.text = None


def given(more: dict[str, Any]) -> Any:
    return {"model": "tiny", "max_output_tokens": 99, "input": QUESTION, **more}


def create(server: Running, **more: Any) -> Any:
    return server.client.responses.create(**given(more))


def plain(response: Any) -> dict[str, Any]:
    """What two answers to one question have in common."""
    document: dict[str, Any] = json.loads(response.model_dump_json())
    for item in document["output"]:
        item.pop("id")
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    kept = ("output", "status", "incomplete_details", "model", "store", "tools", "text", "error")
    return {key: document[key] for key in kept}


def both(server: Running, **more: Any) -> Any:
    """A whole response, which the stream must agree with."""
    whole = create(server, **more)
    events = list(server.client.responses.create(stream=True, **given(more)))
    told = events[-1].response
    assert plain(told) == plain(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    assert rebuilt(events) == json.loads(told.model_dump_json())["output"]
    for usage in (whole.usage, told.usage):
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert 0 <= usage.input_tokens_details.cached_tokens <= usage.input_tokens
        assert usage.output_tokens_details.reasoning_tokens <= usage.output_tokens
    assert told.usage.output_tokens == whole.usage.output_tokens
    return whole


def rebuilt(events: list[Any]) -> list[dict[str, Any]]:
    """The output as its deltas say, which its last events must agree with."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event.type
        if kind == "response.output_item.added":
            assert event.output_index == len(items)
            items.append(json.loads(event.item.model_dump_json()))
            texts = ""
        elif kind.endswith(".delta"):
            assert event.item_id == items[-1]["id"]
            texts += event.delta
        elif kind == "response.function_call_arguments.done":
            assert event.arguments == texts
        elif kind == "response.custom_tool_call_input.done":
            assert event.input == texts
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert event.text == texts
        elif kind == "response.output_item.done":
            items[-1] = json.loads(event.item.model_dump_json())
            said = items[-1].get("arguments", items[-1].get("input"))
            assert texts == (items[-1]["content"][0]["text"] if said is None else said)
    return items


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("It is warm.", ["message"]),
        (f"Let me look.\n{CALL}\n{OTHER}", ["message", "function_call", "function_call"]),
        (f"<think>\nHm, the city.\n</think>\n{CALL}", ["reasoning", "function_call"]),
        ("<think>\nHm.\n</think>\n\nIt is warm.", ["reasoning", "message"]),
    ],
)
def test_an_answer_is_told_by_its_items(
    server: Running, script: Script, text: str, kinds: list[str]
) -> None:
    script.text = text
    response = both(server, tools=TOOLS)
    assert [item.type for item in response.output] == kinds
    assert response.status == "completed"
    assert response.usage.kvdb["left_out_tools"] == ["web_search"]
    for item in response.output:
        if item.type == "function_call":
            arguments = {"query": "été"} if item.name == "search" else {}
            assert json.loads(item.arguments) == arguments
    if "reasoning" in kinds:
        assert response.usage.output_tokens_details.reasoning_tokens > 0


AGENT: list[Any] = [
    {"type": "namespace", "name": "files", "description": "Files", "tools": [TOOLS[0]]},
    {
        "type": "custom",
        "name": "patch",
        "description": "Change files",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
    },
    {"type": "local_shell"},
]


def test_tools_of_other_kinds_are_called_as_functions(server: Running, script: Script) -> None:
    script.text = CALL.replace("search", "files__search")
    first = both(server, tools=AGENT)
    (call,) = first.output
    assert (call.type, call.name, call.namespace) == ("function_call", "search", "files")
    assert first.usage.kvdb["left_out_tools"] == ["local_shell"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a.txt"}
    script.text = '<tool_call>\n{"name": "patch", "arguments": {"input": "été\\n"}}\n</tool_call>'
    second = both(server, tools=AGENT, previous_response_id=first.id, input=[result])
    (call,) = second.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", "été\n")
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    script.text = "It is done."
    third = create(server, tools=AGENT, previous_response_id=second.id, input=[result])
    assert third.usage.input_tokens_details.cached_tokens >= second.usage.input_tokens - 1


def test_the_clients_own_stream_takes_it(server: Running, script: Script) -> None:
    script.text = f"<think>\nHm.\n</think>\nLet me look.\n{CALL}"
    body = given({"tools": TOOLS[:1]})
    with server.client.responses.stream(**body) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text == "Let me look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


def test_an_answer_that_is_cut_is_incomplete(server: Running) -> None:
    response = both(server, max_output_tokens=3, top_logprobs=2, instructions="You answer.")
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    logprobs = response.output[0].content[0].logprobs
    assert [len(each.top_logprobs) for each in logprobs] == [2, 2, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_what_is_kept(
    server: Running, script: Script, stream: bool
) -> None:
    script.text = f"<think>\nHm.\n</think>\nLet me look.\n{CALL}"
    question = f"{LONG} Streamed: {stream}?"
    if stream:
        body = given({"tools": TOOLS, "input": question})
        first = list(server.client.responses.create(stream=True, **body))[-1].response
    else:
        first = create(server, tools=TOOLS, input=question)
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
    script.text = "It is warm."
    second = create(server, tools=TOOLS, previous_response_id=first.id, input=[result])
    third = create(server, tools=TOOLS, previous_response_id=second.id, input="And tomorrow?")
    cached = [each.usage.input_tokens_details.cached_tokens for each in (second, third)]
    assert cached[0] >= first.usage.input_tokens - 1
    assert cached[1] >= second.usage.input_tokens - 1
    # The same from a client that keeps all for itself.
    items: list[Any] = [{"role": "user", "content": question}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    own = create(server, tools=TOOLS, store=False, input=[*items, result])
    assert own.usage.kvdb["skip"] == "full"
    assert own.usage.input_tokens == second.usage.input_tokens


def test_reasoning_goes_back_sealed(server: Running, script: Script) -> None:
    script.text = f"<think>\nHm, été.\n</think>\n{CALL}"
    more: Any = {"tools": TOOLS, "store": False, "include": ["reasoning.encrypted_content"]}
    first = create(server, **more)
    items = [item.model_dump(exclude_none=True) for item in first.output]
    sealed = {key: items[0][key] for key in ("type", "id", "summary", "encrypted_content")}
    before = {"role": "user", "content": QUESTION}
    script.text = "Done."
    open_, closed = (
        create(server, input=[before, reasoning, *items[1:]], **more)
        for reasoning in (items[0], sealed)
    )
    assert closed.usage.kvdb["skip"] == "full"
    assert closed.usage.input_tokens == open_.usage.input_tokens


def test_a_response_is_got_and_forgotten(server: Running) -> None:
    client = server.client
    made, unkept = (create(server, max_output_tokens=2, store=store) for store in (None, False))
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    assert (made.store, unkept.store) == (True, False)
    other = client.with_options(default_headers={"x-kvdb-tenant": "other"})
    for stranger, id_ in ((client, unkept.id), (other, made.id), (client, "resp_" + "0" * 32)):
        with pytest.raises(openai.NotFoundError, match="no response"):
            stranger.responses.retrieve(id_)
        with pytest.raises(openai.NotFoundError, match="no response"):
            httpx_delete(stranger, id_)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        other.responses.create(**given({"previous_response_id": made.id}))
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def httpx_delete(client: openai.OpenAI, id_: str) -> None:
    client.delete(f"/responses/{id_}", cast_to=httpx.Response)


def test_responses_outlive_the_server(start: StartServer, tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        server = start(folder=tmp_path / "store")
        if made:
            again = server.client.responses.retrieve(made[0].id)
            assert again.output_text == made[0].output_text
            more = create(server, previous_response_id=made[0].id, max_output_tokens=2)
            cached = more.usage.input_tokens_details.cached_tokens
            assert cached >= made[0].usage.input_tokens - 1
        made.append(create(server, input=LONG, max_output_tokens=4))
        server.pool.close()
        assert server.store is not None
        server.store.close()


def test_guided_answers(server: Running) -> None:
    format_ = {"type": "json_schema", "name": "place", "schema": PLACE, "strict": True}
    response = both(server, text={"format": format_})
    assert json.loads(response.output_text)["city"] in ("Paris", "Rome")
    choice = {"type": "function", "name": "now"}
    called = create(server, tools=TOOLS, tool_choice=choice, max_output_tokens=60)
    assert called.status == "incomplete" or called.output[-1].name == "now"


IMAGE = {"type": "input_image", "image_url": "http://127.0.0.1:1/x.png"}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"input": []}, "empty"),
        ({"input": None}, "input"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "role"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input_image"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"type": "reasoning", "encrypted_content": "kvdb1.!"}]}, "encrypted_content"),
        ({"max_output_tokens": 0}, "max_tokens"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "two tools"),
        ({"tools": [{"type": "namespace", "name": "files"}]}, "namespace"),
        ({"tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "delete"}}, "delete"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"previous_response_id": "resp_" + "0" * 32}, "previous_response_id"),
        ({"previous_response_id": "\ud800"}, "previous_response_id"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    server: Running, body: dict[str, Any], word: str
) -> None:
    for stream in (False, True):
        answer = server.post("/v1/responses", {**given({}), **body, "stream": stream})
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert word in error["message"]
        assert error["message"].endswith(".")
        assert "\n" not in error["message"]
