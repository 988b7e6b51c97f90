"""Anthropic's messages through the official client: a stream says what a whole answer says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.http.conftest import Running, StartServer
from tests.http.scripts import Script

LONG = "The quick brown fox jumps over the lazy dog. " * 8
SYSTEM = "You are a helpful assistant that answers in short sentences. " * 4
TOOLS: list[Any] = [
    {
        "name": "search",
        "description": "Search the web",
        "input_schema": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
    {
        "name": "read_file",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "été"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.txt"}}\n</tool_call>'
USER: Any = {"role": "user", "content": "What is the weather of the city?"}
EPHEMERAL = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def script(chat_folder: Path) -> Script:
    return Script(chat_folder)


@pytest.fixture(scope="module")
def server(start: StartServer, script: Script) -> Running:
    return start(adapt=script, max_tokens=400)


@pytest.fixture(autouse=True)
def _unscripted(script: Script) -> Iterator[None]:
    yield
    script.text = None


@cache
def client(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


SAMPLING = ("temperature", "top_k", "top_p")  # which the client no longer has


def given(body: dict[str, Any]) -> Any:
    sampling = {key: body[key] for key in SAMPLING if key in body}
    rest = {key: value for key, value in body.items() if key not in SAMPLING}
    return {"model": "tiny", "max_tokens": 99, "messages": [USER], "extra_body": sampling, **rest}


def create(server: Running, **body: Any) -> Any:
    return client(server).messages.create(**given(body))


def both(server: Running, **more: Any) -> Any:
    """A whole answer, which the stream must agree with."""
    body = given(more)
    whole = client(server).messages.create(**body)
    with client(server).messages.stream(**body) as stream:
        names = [event.type for event in stream]
        told = stream.get_final_message()
    same = ("content", "stop_reason", "stop_sequence", "model", "role", "type")
    for key in same:
        left, right = (json.loads(each.model_dump_json())[key] for each in (whole, told))
        for block in (*left, *right) if key == "content" else ():
            block.pop("id", None)  # each call has one of its own
            block.pop("parsed_output", None)
        assert left == right, key
    for answer in (whole, told):
        usage = answer.usage
        read, made = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        assert usage.input_tokens + read + made == count(server, **more)
        assert min(usage.input_tokens, read, made) >= 0
    assert told.usage.output_tokens == whole.usage.output_tokens
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    return whole


def count(server: Running, **body: Any) -> int:
    known = ("messages", "system", "tools", "thinking")
    body = {"messages": [USER], **{key: body[key] for key in known if key in body}}
    return client(server).messages.count_tokens(model="tiny", **body).input_tokens


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": SYSTEM, "temperature": 0.9, "top_k": 1, "top_p": 0.9},
        {"system": [{"type": "text", "text": SYSTEM}]},
        {"tools": TOOLS, "metadata": {"user_id": "u"}, "thinking": {"type": "disabled"}},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
def test_a_stream_says_what_a_whole_answer_says(server: Running, more: dict[str, Any]) -> None:
    answer = both(server, max_tokens=8, **more)
    assert answer.content[0].text
    assert answer.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("It is warm.", ["text"]),
        (CALL, ["tool_use"]),
        (f"Let me look.\n{CALL}\n{OTHER}", ["text", "tool_use", "tool_use"]),
        (f"<think>\nHm, the city.\n</think>\n{CALL}", ["thinking", "tool_use"]),
        ("<think>\nHm.\n</think>\n\nIt is warm.", ["thinking", "text"]),
    ],
)
def test_an_answer_is_told_by_its_blocks(
    server: Running, script: Script, text: str, kinds: list[str]
) -> None:
    script.text = text
    answer = both(server, tools=TOOLS)
    assert [block.type for block in answer.content] == kinds
    assert answer.stop_reason == ("tool_use" if "tool_use" in kinds else "end_turn")
    for block in answer.content:
        if block.type == "tool_use" and block.name == "search":
            assert block.input == {"query": "été"}
        if block.type == "thinking":
            assert block.signature


def test_events_have_anthropics_names_and_order(server: Running, script: Script) -> None:
    script.text = f"<think>\nHm.\n</think>\nSo.\n{CALL}"
    body = {"model": "tiny", "max_tokens": 99, "messages": [USER], "tools": TOOLS, "stream": True}
    text = server.post("/v1/messages", body).text
    frames = [part for part in text.split("\n\n") if part.startswith("event: ")]
    events = []
    for part in frames:
        name, data = part.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        kind = document.get("delta", {}).get("type") or document.get("content_block", {}).get(
            "type"
        )
        events.append((document["type"], kind) if kind else document["type"])
    shown = [event for at, event in enumerate(events) if event not in ("ping", events[at - 1])]
    assert "ping" in events
    last = json.loads(frames[-2].split("data: ")[1])
    assert last["usage"]["kvdb"]["skip"] in ("none", "partial", "full")
    assert shown == [
        "message_start",
        ("content_block_start", "thinking"),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        "content_block_stop",
        ("content_block_start", "text"),
        ("content_block_delta", "text_delta"),
        "content_block_stop",
        ("content_block_start", "tool_use"),
        ("content_block_delta", "input_json_delta"),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_a_stop_sequence_is_told(server: Running, script: Script) -> None:
    script.text = "One two STOP three"
    answer = both(server, stop_sequences=["nothing", "STOP"])
    assert answer.content[0].text == "One two "
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")


def test_a_call_and_its_result_go_back(server: Running, script: Script) -> None:
    script.text = f"<think>\nHm.\n</think>\nLet me look.\n{CALL}"
    first = create(server, tools=TOOLS)
    use = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "22 degrees"}
    script.text = "It is warm."
    blocks = [block.model_dump(exclude_none=True) for block in first.content]
    turns = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    second = create(server, tools=TOOLS, messages=turns)
    assert second.content[0].text == "It is warm."
    prompt = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert second.usage.cache_read_input_tokens >= prompt - 1


def test_tool_choice(server: Running, script: Script) -> None:
    script.text = CALL
    assert both(server, tools=TOOLS, tool_choice={"type": "none"}).content[0].text == CALL
    script.text = None
    body: dict[str, Any] = {"tools": TOOLS, "temperature": 1.0, "max_tokens": 60}
    for choice in ({"type": "any"}, {"type": "tool", "name": "read_file"}):
        answer = create(server, tool_choice=choice, **body)
        names = {block.name for block in answer.content if block.type == "tool_use"}
        assert names or answer.stop_reason == "max_tokens"
        assert names <= {"read_file"} or choice["type"] == "any"


def test_a_marked_prefix_is_kept_and_read(server: Running) -> None:
    def ask(question: str) -> Any:
        system = [
            {"type": "text", "text": SYSTEM, "cache_control": {**EPHEMERAL, "ttl": "1h"}},
            {"type": "text", "text": f"Today is {question}."},
        ]
        part = {"type": "text", "text": LONG + question, "cache_control": EPHEMERAL}
        turn = {"role": "user", "content": [part]}
        return create(server, system=system, messages=[turn], max_tokens=4)

    first, second = ask("Monday"), ask("Tuesday")
    usage, again = first.usage, second.usage
    marks = usage.kvdb["marks"]
    assert [mark["ttl_seconds"] for mark in marks] == [3600, 300]
    assert [mark["state"] for mark in marks] == ["held", "held"]
    created = usage.cache_creation
    assert created.ephemeral_1h_input_tokens == marks[0]["tokens"] - usage.cache_read_input_tokens
    assert created.ephemeral_5m_input_tokens == marks[1]["tokens"] - marks[0]["tokens"]
    assert again.cache_read_input_tokens >= marks[0]["tokens"]
    assert again.cache_creation.ephemeral_1h_input_tokens == 0
    # It stays when all else goes.
    assert server.store is not None
    server.store.flush(30)
    server.store.evict(to_bytes=0)
    assert ask("Sunday").usage.cache_read_input_tokens >= marks[0]["tokens"] - 1


def test_where_the_share_is_full_it_is_stored_unpinned(server: Running) -> None:
    def ask(tenant: str) -> str:
        part = {"type": "text", "text": SYSTEM, "cache_control": EPHEMERAL}
        headers = {"x-kvdb-tenant": tenant}
        answer = create(server, system=[part], extra_headers=headers, max_tokens=1)
        state: str = answer.usage.kvdb["marks"][0]["state"]
        return state

    assert ask("large") == "held"
    (nbytes,) = server.one(
        "SELECT sum(p.nbytes) FROM parts AS p JOIN blocks AS b ON b.id = p.block_id "
        "JOIN namespaces AS n ON n.id = b.namespace_id WHERE n.tenant = 'large'"
    )
    assert server.store is not None
    server.store.set_quota(nbytes * 3 // 2, tenant="small")  # half of that may be held
    assert ask("small") == "share full"


def test_claude_codes_billing_line_is_no_prompt(server: Running) -> None:
    def ask(check: str) -> Any:
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={check};"}
        return create(server, system=[line, {"type": "text", "text": SYSTEM}], max_tokens=2)

    ask("a1b2c")
    assert ask("d3e4f").usage.kvdb["skip"] == "full"


REMIND = {"role": "system", "content": "Answer in French."}


@pytest.mark.parametrize("template", ["takes", "refuses"])
def test_system_text_in_midst_of_a_conversation(
    start: StartServer, server: Running, strict_folder: Path, template: str
) -> None:
    here = server if template == "takes" else start(model=strict_folder)
    turns = [USER, REMIND, {"role": "assistant", "content": "Non."}, USER]
    assert both(here, messages=turns, max_tokens=3).content
    if template == "refuses":
        reminder = "<system-reminder>\nAnswer in French.\n</system-reminder>"
        told = {"role": "user", "content": f"{USER['content']}\n{reminder}"}
        assert count(here, messages=[told, *turns[2:]]) == count(here, messages=turns)


@pytest.fixture(scope="module")
def strict_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from chat_model import TEMPLATE, write_chat_model

    refusal = (
        "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}"
        "{{- raise_exception('System message must be at the beginning.') }}{%- endif %}"
        "{%- endfor %}\n"
    )
    folder = tmp_path_factory.mktemp("models") / "strict"
    return write_chat_model(folder, template=refusal + TEMPLATE)


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
MARKED = {"type": "text", "text": "Hi", "cache_control": EPHEMERAL}


def said(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"messages": []}, "empty"),
        ({"messages": "Hi"}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "role"),
        (said(IMAGE), "image"),
        (said(DOCUMENT), "document"),
        (said({"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}), "image"),
        (said({"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}), "server"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        ({"mcp_servers": [{"type": "url", "name": "x", "url": "http://x"}]}, "mcp_servers"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "delete"}}, "delete"),
        ({"thinking": {"type": "maybe"}}, "thinking"),
        (said({**MARKED, "cache_control": {"type": "ephemeral", "ttl": "1d"}}), "ttl"),
        (said(*[MARKED] * 5), "cache_control"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config"),
        ({"kvdb": {"prio": 1}}, "kvdb.prio"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    server: Running, body: dict[str, Any], word: str
) -> None:
    whole = {"model": "tiny", "max_tokens": 9, "messages": [USER], **body}
    for stream in (False, True):
        answer = server.post("/v1/messages", {**whole, "stream": stream})
        document = answer.json()
        assert (answer.status_code, document["type"]) == (400, "error"), document
        assert document["error"]["type"] == "invalid_request_error"
        assert word in document["error"]["message"]
        assert document["error"]["message"].endswith(".")
        assert "\n" not in document["error"]["message"]


def test_errors_have_anthropics_classes(server: Running) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served"):
        create(server, model="claude-opus-4-8")
    with pytest.raises(anthropic.BadRequestError, match="top_p"):
        create(server, top_p=2.0)
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x,y"}
    body = {"model": "tiny", "max_tokens": 1, "messages": [USER]}
    assert server.post("/v1/messages?beta=true", body, **headers).status_code == 200


def test_an_answer_by_a_schema(server: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = both(server, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(answer.content[0].text)["city"] in ("Paris", "Rome")
