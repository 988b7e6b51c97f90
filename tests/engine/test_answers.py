"""Answers to pieces: however the text is cut, in every style, and whatever a model writes."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_model import tool, write_chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.answers import (
    AnswerParser,
    AnswerStyle,
    Piece,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallStart,
)
from engine.answers.style import OWN_PARSER, TOOL_MARKS, infer_style
from engine.prompt.tokenizer import load_tokenizer

TOOLS = [tool("search"), tool("weather", city="A city")]
THINK = ("<think>", "</think>")
HERMES = AnswerStyle(THINK, "json_tools")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Wien"}}\n</tool_call>'
# A call of weather(city="Wien") and what else the parser of that name reads, as models write it.
WRITTEN: dict[str, str] = {
    "function_gemma": "call:weather{city:<escape>Wien<escape>}",
    "gemma4": 'call:weather{city:<|"|>Wien<|"|>}',
    "glm47": "weather\n<arg_key>city</arg_key>\n<arg_value>Wien</arg_value>\n",
    "json_tools": '\n{"name": "weather", "arguments": {"city": "Wien"}}\n',
    "kimi_k2": (
        "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Wien"}<|tool_call_end|>'
    ),
    "kimi_k3": (
        '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"'
        "<|sep|>Wien<|close|>argument<|sep|><|close|>call<|sep|>"
    ),
    "laguna": "weather\n<arg_key>city</arg_key>\n<arg_value>Wien</arg_value>\n",
    "longcat": (
        "weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Wien</longcat_arg_value>\n"
    ),
    "minicpm5": '"weather"><param name="city">Wien</param>',
    "minimax_m2": '\n<invoke name="weather">\n<parameter name="city">Wien</parameter>\n</invoke>\n',
    "mistral": 'weather[ARGS]{"city": "Wien"}',
    "muse_spark": (
        '<atem:invoke name="weather"><atem:parameter name="city">Wien</atem:parameter>'
        "</atem:invoke>"
    ),
    "pythonic": '[weather(city="Wien")]',
    "qwen3_coder": "\n<function=weather>\n<parameter=city>\nWien\n</parameter>\n</function>\n",
}


def ids() -> Callable[[], str]:
    count = itertools.count()
    return lambda: f"call_{next(count)}"


def parse(
    style: AnswerStyle, feeds: Sequence[str], tools: Any = TOOLS, *, in_reasoning: bool = False
) -> list[Piece]:
    parser = AnswerParser(style, tools, ids(), in_reasoning=in_reasoning)
    pieces = [piece for feed in feeds for piece in parser.feed(feed)]
    return join([*pieces, *parser.end()])


def join(pieces: Sequence[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, TextPiece | ReasoningPiece) and type(piece) is type(last):
            joined[-1] = type(piece)(last.text + piece.text)  # type: ignore[union-attr]
        else:
            joined.append(piece)
    return joined


def weather(index: int = 0, id_: str | None = None) -> list[Piece]:
    start = ToolCallStart(index, id_ or f"call_{index}", "weather")
    return [start, ToolCallArguments(index, '{"city": "Wien"}')]


def one_by_one(style: AnswerStyle, text: str, **options: Any) -> list[Piece]:
    pieces = parse(style, list(text), **options)
    assert pieces == parse(style, [text], **options)
    return pieces


def test_reasoning_text_and_several_calls() -> None:
    text = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{CALL}\nDone. "
    assert one_by_one(HERMES, text) == [
        ReasoningPiece("Where?"),
        TextPiece("I look."),
        *weather(0),
        *weather(1),
        TextPiece("Done. "),
    ]
    assert one_by_one(HERMES, f"I look.\n\n{CALL}")[0] == TextPiece("I look.\n")
    assert one_by_one(HERMES, f"\n \n{CALL}\n") == weather()
    opened = one_by_one(HERMES, f"Where?\n</think>\n{CALL}", in_reasoning=True)
    assert opened == [ReasoningPiece("Where?"), *weather()]


def test_text_comes_as_soon_as_it_can_be_no_mark() -> None:
    parser = AnswerParser(HERMES, TOOLS, ids())
    assert parser.feed("a <too") == [TextPiece("a")]
    assert parser.feed("l_box> b") == [TextPiece(" <tool_box> b")]
    assert parser.feed(" <th") == []
    assert parser.feed("ink>x") == [TextPiece(" "), ReasoningPiece("x")]
    assert parser.end() == []


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{not json}\n</tool_call>",
        "<tool_call>[1, 2]</tool_call>",
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"x": NaN}}</tool_call>',
        f"<tool_call>{'[' * 100_000}</tool_call>",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Wi',
        "a</tool_call> b </think> c<tool_c",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert parse(HERMES, [text]) == [TextPiece(text)]
    assert parse(HERMES, [text[:9], text[9:20], text[20:]]) == [TextPiece(text)]


def test_without_tools_a_call_is_text() -> None:
    assert one_by_one(HERMES, CALL, tools=None) == [TextPiece(CALL)]


def test_a_mark_that_was_only_mentioned_hides_no_call() -> None:
    text = f"<think>I might use <tool_call> here.</think>So:\n{CALL}"
    assert one_by_one(HERMES, text) == [
        ReasoningPiece("I might use <tool_call> here."),
        TextPiece("So:"),
        *weather(),
    ]
    mentioned = "Between <tool_call> and </tool_call> stands JSON."
    assert one_by_one(HERMES, mentioned + CALL) == [TextPiece(mentioned), *weather()]


def test_arguments_are_text_that_can_be_sent() -> None:
    text = (
        '<tool_call>{"name": "weather", "arguments": {"city": "Wi\\ud800en", "x": "ü"}}</tool_call>'
    )
    (_, arguments) = parse(HERMES, [text])
    assert isinstance(arguments, ToolCallArguments)
    arguments.text.encode()
    assert json.loads(arguments.text) == {"city": "Wi\ud800en", "x": "ü"}
    given = '<tool_call>{"name": "now"}</tool_call>'
    assert parse(HERMES, [given]) == [ToolCallStart(0, "call_0", "now"), ToolCallArguments(0, "{}")]


def test_several_messages_with_headers() -> None:
    """The format of Muse Spark, as mlx_lm.chat_templates.muse_spark describes it."""
    style = AnswerStyle(None, "muse_spark", frame="muse_spark")
    call = "<atem:function_calls>" + WRITTEN["muse_spark"] + "</atem:function_calls>"
    text = "to=self<|message|>A tool knows.<|eom|><|start|>assistant to=weather<|message|>" + call
    assert one_by_one(style, text) == [ReasoningPiece("A tool knows."), *weather()]
    answer = "to=self<|message|>Easy.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>"
    assert one_by_one(style, answer) == [ReasoningPiece("Easy."), TextPiece("Yes.")]
    assert one_by_one(style, "no header") == [TextPiece("no header")]


@pytest.mark.parametrize("name", TOOL_MARKS)
def test_every_format_of_mlx_lm(name: str) -> None:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    assert TOOL_MARKS[name] == (module.tool_call_start, module.tool_call_end)
    begin, end = TOOL_MARKS[name]
    own_id = "functions.weather:0" if name == "kimi_k2" else None
    pieces = one_by_one(AnswerStyle(None, name), f"I look. {begin}{WRITTEN[name]}{end}")
    assert pieces == [TextPiece("I look. "), *weather(id_=own_id)]


def test_no_format_of_mlx_lm_is_missing() -> None:
    folder = Path(importlib.import_module("mlx_lm.tool_parsers.json_tools").__file__ or "").parent
    assert {path.stem for path in folder.glob("[a-z]*.py")} == set(TOOL_MARKS) == set(WRITTEN)


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "\n", " ", "<", "tool_call>"]
answers = st.lists(st.sampled_from(MARKS) | st.text("ab{}<>/ \n", max_size=6), max_size=12)


@st.composite
def cut_answers(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = "".join(draw(answers))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


def squeezed(text: str) -> str:
    return "".join(text.split())


@settings(max_examples=400, deadline=None)
@given(cut=cut_answers(), tools=st.booleans(), in_reasoning=st.booleans())
def test_pieces_do_not_depend_on_how_the_text_is_cut(
    cut: tuple[str, list[str]], tools: bool, in_reasoning: bool
) -> None:
    text, feeds = cut
    given_tools = TOOLS if tools else None
    whole = parse(HERMES, [text], given_tools, in_reasoning=in_reasoning)
    assert parse(HERMES, feeds, given_tools, in_reasoning=in_reasoning) == whole
    # Nothing is lost, but marks of reasoning and whitespace: calls put back, the text is there.
    said = "".join(
        piece.text
        if isinstance(piece, TextPiece | ReasoningPiece)
        else CALL * isinstance(piece, ToolCallStart)
        for piece in whole
    )
    without = squeezed(text)
    for mark in THINK:
        without, said = without.replace(mark, ""), said.replace(mark, "")
    assert squeezed(said) == without


# -- styles --------------------------------------------------------------------------------------

TEMPLATES = [
    None,
    "{{ messages }}",
    *(
        "{{ tools }}" + text
        for text in (
            "<minimax:tool_call>",
            "<|tool_call> <tool_call|>",
            "<start_function_call>",
            "<longcat_tool_call>",
            "<tool_call><arg_key>",
            "<|tool_list_start|>",
            "<|tool_call_start|>",
            "<tool_call>\\n<function=",
            "<tool_call>\n<function=",
            "<|tool_calls_section_begin|>",
            '<function name="<param name="',
            "[TOOL_CALLS]",
            "<atem:function_calls>",
            "<tool_call>{{ tool_call.name }}",
            "<tool_call>",
        )
    ),
]
VOCABULARIES: list[list[str]] = [
    [],
    ["<think>", "</think>", "<tool_call>"],
    ["<longcat_think>", "</longcat_think>"],
    ["<|think:start|>", "<|think:end|>", "<think>"],
    ["<|channel>", "<channel|>", "thought"],
    ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    ["<|tool_call_start|>", "<|tool_call_end|>"],
]


class Known:
    """As much of a tokenizer as mlx-lm's wrapper looks at."""

    eos_token_id = None

    def __init__(self, template: str | None, vocabulary: Sequence[str]) -> None:
        self.chat_template = template
        self.init_kwargs: Mapping[str, Any] = {}
        self._vocabulary = {token: id_ for id_, token in enumerate(vocabulary)}

    def get_vocab(self) -> Mapping[str, int]:
        return self._vocabulary

    def encode(self, text: str, **_: Any) -> list[int]:
        return [len(text)]

    def apply_chat_template(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=str)
def test_a_style_is_what_mlx_lm_infers(vocabulary: list[str]) -> None:
    for template in TEMPLATES:
        same_style(template, vocabulary)


def same_style(template: str | None, vocabulary: list[str]) -> None:
    from mlx_lm.generate import make_text_state_machine
    from mlx_lm.tokenizer_utils import TokenizerWrapper, _infer_tool_parser

    known: Any = Known(template, vocabulary)
    parser = _infer_tool_parser(known)
    style = infer_style(template, known.get_vocab(), {}, own_tools=False)
    assert style.tool_parser == parser
    begin, end = style.tool_marks or (None, None)
    theirs = TokenizerWrapper(
        known, lambda _: None, tool_call_start=begin, tool_call_end=end, tool_parser=parser
    )
    assert style.thinking == (
        (theirs.think_start, theirs.think_end) if theirs.think_start else None
    )
    if style.frame is None:  # its tables come with the model's module
        machine = make_text_state_machine(theirs)
        for part, edges in style.edges(tools=True).items():
            expected = machine._states.get(part, (None, ()))[1]
            assert [to for _, to in edges] == list(expected)


def test_the_style_of_a_folder_needs_no_mlx(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path / "own", "{% for m in messages %}{{ m.content }}{% endfor %}")
    style = load_tokenizer(tmp_path / "own").style
    assert (style.own_tools, style.tool_parser, style.thinking) == (True, OWN_PARSER, THINK)
    assert load_tokenizer(tmp_path / "own").style == style  # remembered
    write_chat_tokenizer(tmp_path / "template")
    config = tmp_path / "template" / "tokenizer_config.json"
    assert load_tokenizer(config.parent).style.tool_parser is None
    config.write_text(json.dumps({**json.loads(config.read_text()), "tool_parser_type": "glm47"}))
    style = load_tokenizer(config.parent).style
    assert (style.own_tools, style.tool_parser) == (False, "glm47")


def test_a_prompt_may_leave_the_answer_inside_of_reasoning(tmp_path: Path) -> None:
    """As Qwen3's thinking models and DeepSeek R1 have it, unless an option says otherwise."""
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>assistant\n<think>\n"
        "{% if enable_thinking is false %}\n</think>\n\n{% endif %}"
    )
    write_chat_tokenizer(tmp_path, template)
    made = load_tokenizer(tmp_path)
    assert made.template is not None
    for options, opened in (({}, True), ({"enable_thinking": False}, False)):
        prompt = made.template.render([{"role": "user", "content": "?"}], options=options)
        assert made.style.opens_reasoning(prompt[-32:]) == opened
