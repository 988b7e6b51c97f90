"""Tools on a chat template that has none: what the model reads, and where each part of it lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_model import TEMPLATE, tool, write_chat_model, write_chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.answers import AnswerParser, TextPiece, ToolCallArguments, ToolCallStart
from engine.events import Request
from engine.models import find_local
from engine.prompt.boundaries import answer_starts, unstable_at
from engine.prompt.encode import Prompt, encode
from engine.prompt.tokenizer import PromptTokenizer, load_tokenizer
from kvdb.errors import PromptError

TOOLS = [tool("search"), tool("weather", city="Ein Ort in Österreich <b>")]
# As SmolLM2's, but for the system prompt that it writes when there is none.
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Gemma's: turns alternate, and the system's text is in the first of them.
STRICT = """\
{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('must alternate') }}
{%- endif %}
{{- '<|im_start|>' + m.role + '\n' + (first if loop.first else '') + m.content | trim }}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def call(name: str, **arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


AGENT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & kind."},
    {"role": "user", "content": "Und das Wetter? 🌦"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [call("weather", city="Wien"), call("weather", city="Graz")],
    },
    {"role": "tool", "tool_call_id": "1", "content": '{"degrees": 3.5}'},
    {"role": "tool", "tool_call_id": "2", "content": "sunny"},
    {"role": "assistant", "content": None, "tool_calls": [call("search", query="ü")]},
    {"role": "tool", "tool_call_id": "3", "content": "nothing"},
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "Thanks."},
]


def tokenizer(folder: Path, template: str) -> PromptTokenizer:
    write_chat_tokenizer(folder, template)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return tokenizer(tmp_path_factory.mktemp("chatml"), CHATML)


def prompt(made: PromptTokenizer, messages: Any = AGENT, tools: Any = TOOLS) -> Prompt:
    return encode(Request(messages=messages, tools=tools), made, None, None)


def shown(made: PromptTokenizer, given: Prompt) -> list[tuple[str, int | None, str]]:
    """``(kind, index, text)`` of the parts of a prompt."""
    parts, start = [], 0
    for part in given.segments():
        text = made.decode(given.tokens[start : part.end].tolist())
        parts.append((part.kind, part.index, text))
        start = part.end
    return parts


def test_the_model_is_told_of_tools_calls_and_results(chatml: PromptTokenizer) -> None:
    text = prompt(chatml).text or ""
    system, rest = text.split("<|im_end|>\n", 1)
    begin = "<|im_start|>system\nBe brief & kind.\n\n# Tools\n"
    assert system.startswith(begin)
    between = system.split("<tools>\n")[1].split("</tools>")[0]
    assert [json.loads(line) for line in between.splitlines()] == TOOLS
    assert rest == (
        "<|im_start|>user\nUnd das Wetter? 🌦<|im_end|>\n"
        "<|im_start|>assistant\nI look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Wien"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Graz"}}\n</tool_call><|im_end|>\n'
        '<|im_start|>user\n<tool_response>\n{"degrees": 3.5}\n</tool_response><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "search", "arguments": {"query": "ü"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nnothing\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nSunny.<|im_end|>\n"
        "<|im_start|>user\nThanks.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_what_is_written_for_a_call_is_parsed_to_it(chatml: PromptTokenizer) -> None:
    """So that a model that repeats what it reads calls a tool."""
    message = AGENT[2]
    text = (prompt(chatml, AGENT[:3]).text or "").split("assistant\n")[1].split("<|im_end|>")[0]
    parser = AnswerParser(chatml.style, TOOLS, lambda: "1")
    pieces = [*parser.feed(text), *parser.end()]
    assert pieces[0] == TextPiece(message["content"])
    calls = [piece.name for piece in pieces if isinstance(piece, ToolCallStart)]
    arguments = [json.loads(p.text) for p in pieces if isinstance(p, ToolCallArguments)]
    expected = [given["function"] for given in message["tool_calls"]]
    assert [{"name": n, "arguments": a} for n, a in zip(calls, arguments, strict=True)] == expected


@pytest.mark.parametrize("with_system", [True, False])
def test_messages_and_tools_have_their_own_text(chatml: PromptTokenizer, with_system: bool) -> None:
    chat = AGENT if with_system else AGENT[1:]
    given = prompt(chatml, chat)
    parts = shown(chatml, given)
    tools = [(index, json.loads(text)) for kind, index, text in parts if kind == "tool"]
    assert tools == list(enumerate(TOOLS))
    messages = {index: text for kind, index, text in parts if kind == "message"}
    for index, message in enumerate(chat):
        if message["role"] == "system":
            assert parts[0][0] == "system"
            continue
        role = "user" if message["role"] == "tool" else message["role"]
        assert messages[index].startswith(f"<|im_start|>{role}\n")
        assert messages[index].endswith("<|im_end|>\n")
        assert (message["content"] or "search") in messages[index]


def test_templates_that_insist_on_turns_get_them(tmp_path: Path) -> None:
    for name, template in (("strict", STRICT), ("no-system", NO_SYSTEM + STRICT)):
        made = tokenizer(tmp_path / name, template)
        chat = AGENT if name == "strict" else AGENT[1:]
        given = prompt(made, chat)
        text = given.text or ""
        assert text.count("<|im_start|>user\n") == text.count("<|im_start|>assistant\n") == 4
        assert '{"degrees": 3.5}\n</tool_response>\n\n<tool_response>\nsunny' in text
        assert text.index("# Tools") < text.index("Und das")
        kinds = shown(made, given)
        assert [json.loads(text) for kind, _, text in kinds if kind == "tool"] == TOOLS
        ends = {index: text for kind, index, text in kinds if kind == "message"}
        first = chat.index(AGENT[3])
        assert ends[first].endswith('{"degrees": 3.5}\n</tool_response>')
        assert ends[first + 1].endswith("sunny\n</tool_response><|im_end|>\n")


contents = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
messages_ = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"])})
    .flatmap(lambda m: st.fixed_dictionaries({"role": st.just(m["role"]), "content": contents}))
    .flatmap(
        lambda m: (
            st.just(m)
            if m["role"] != "assistant"
            else st.builds(
                lambda text: {**m, "tool_calls": [call("search", query=text)]},
                contents,
            )
            | st.just(m)
        )
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80, deadline=None)
@given(chat=messages_)
def test_what_is_written_for_a_message_does_not_depend_on_later_ones(
    chatml: PromptTokenizer, chat: list[dict[str, Any]]
) -> None:
    assert chatml.template is not None
    text = chatml.template.render(chat, TOOLS)
    assert unstable_at(chatml.template, chat, TOOLS, {}, text) is None
    cue = "<|im_start|>assistant\n"
    starts = answer_starts(chatml.template, chat, TOOLS, {}, text)
    assert len(starts) == sum(message["role"] == "assistant" for message in chat)
    assert all(text.endswith(cue, 0, start) for start in starts)


def test_odd_calls_are_written_or_refused(chatml: PromptTokenizer) -> None:
    odd = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{brok"}}]}
    assert '{"name": "f", "arguments": "{brok"}' in (prompt(chatml, [odd]).text or "")
    for calls in ("x", [1], [{"function": 1}]):
        with pytest.raises(PromptError):
            prompt(chatml, [{"role": "assistant", "content": "", "tool_calls": calls}])
    with pytest.raises(PromptError):
        prompt(chatml, [{"role": "user", "content": ["x"]}])


def test_a_template_with_tools_is_left_alone(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, TEMPLATE)
    assert made.template is not None
    assert made.template.has_tools
    assert not made.style.own_tools
    assert "one or more of these functions" not in (prompt(made).text or "")


def test_the_engine_renders_tools_by_it_too(tmp_path: Path, make_engine: Any) -> None:
    folder = write_chat_model(tmp_path / "model", template=CHATML)
    light = load_tokenizer(folder)
    request = Request(messages=AGENT, tools=TOOLS)
    loaded = make_engine(None, folder).call(lambda worker: worker.loaded)
    assert loaded.answer_style == light.style
    engine = encode(request, loaded.prompts, None, 1024, loaded=loaded.tokenizer)
    own = encode(request, light, None, None)
    assert engine.tokens.tolist() == own.tokens.tolist()
    assert engine.segments() == own.segments() != []


@pytest.mark.model
def test_smollm2_is_told_of_tools() -> None:
    folder = find_local("smollm2-135m")
    assert folder is not None
    made = load_tokenizer(folder)
    assert made.style.own_tools
    given = prompt(made, AGENT[1:])
    assert "You are a helpful AI assistant" not in (given.text or "")
    assert [json.loads(text) for kind, _, text in shown(made, given) if kind == "tool"] == TOOLS
    assert made.decode(given.tokens.tolist()) == given.text
