"""How a model marks the parts of its answers, from its tokenizer and chat template alone.

mlx-lm infers the same when it loads a tokenizer (``mlx_lm.tokenizer_utils``), but only with MLX
loaded; a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

Edges = tuple[tuple[str, str], ...]

# A vocabulary with all of the first has the marks that follow.
THINKING: tuple[tuple[tuple[str, ...], tuple[str, str]], ...] = (
    (("<think>", "</think>"), ("<think>", "</think>")),
    (("<longcat_think>", "</longcat_think>"), ("<longcat_think>", "</longcat_think>")),
    (("<|think:start|>", "<|think:end|>"), ("<|think:start|>", "<|think:end|>")),
    (("<|channel>", "<channel|>"), ("<|channel>thought", "<channel|>")),
)
XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
XTML_THINKING = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
XTML_FRAME = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
# Marks around a call, by module of mlx_lm.tool_parsers. Without an end, it lasts to the answer's.
TOOL_MARKS: Mapping[str, tuple[str, str]] = {
    "function_gemma": ("<start_function_call>", "<end_function_call>"),
    "gemma4": ("<|tool_call>", "<tool_call|>"),
    "glm47": ("<tool_call>", "</tool_call>"),
    "json_tools": ("<tool_call>", "</tool_call>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "kimi_k3": ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    "laguna": ("<tool_call>", "</tool_call>"),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "minicpm5": ("<function name=", "</function>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "mistral": ("[TOOL_CALLS]", ""),
    "muse_spark": ("<atem:function_calls>", "</atem:function_calls>"),
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
}
# The first one that fits: all of some texts are in the chat template.
PARSERS_BY_TEMPLATE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm47", ("<arg_key>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("qwen3_coder", ("<tool_call>\\n<function=",)),
    ("qwen3_coder", ("<tool_call>\n<function=",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("mistral", ("[TOOL_CALLS]",)),
    ("muse_spark", ("<atem:function_calls>",)),
    ("json_tools", ("<tool_call>", "tool_call.name")),
)
# Answers of several messages, each with a header, by mlx_lm.chat_templates: where an answer begins,
# and what ends each part.
FRAMES: Mapping[str, tuple[str, Mapping[str, Edges]]] = {
    "muse_spark": (
        "header",
        {
            "header": (
                ("to=self<|message|>", "reasoning"),
                ("to=user<|message|>", "normal"),
                ("to=commentary<|message|>", "normal"),
                ("<atem:function_calls>", "tool"),
            ),
            "reasoning": (("<|eom|>", "header"),),
            "normal": (("<|eom|>", "header"), ("<|eot|>", "normal")),
        },
    )
}
# The parser of what engine/prompt/tools.py asks a model for.
OWN_PARSER = "json_tools"


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """``thinking`` are the marks around reasoning. ``tool_parser`` is a module of
    mlx_lm.tool_parsers, None where calls cannot be told. ``own_tools``: the model's chat template
    has no tools, so that ours renders them. ``xtml`` and ``frame``: see the tables above."""

    thinking: tuple[str, str] | None = None
    tool_parser: str | None = None
    own_tools: bool = False
    xtml: bool = False
    frame: str | None = None

    @property
    def tool_marks(self) -> tuple[str, str] | None:
        """Marks around a call, if there are calls; the second may be empty."""
        return None if self.tool_parser is None else TOOL_MARKS.get(self.tool_parser)

    @property
    def first_part(self) -> str:
        """``normal``, ``header`` or what else an answer begins with."""
        return "normal" if self.frame is None else FRAMES[self.frame][0]

    def edges(self, *, tools: bool) -> dict[str, Edges]:
        """By part of an answer, the marks that end it and the parts that these begin; with
        ``tools`` also those of calls. As mlx-lm's ``make_text_state_machine`` has them."""
        frame = {} if self.frame is None else FRAMES[self.frame][1]
        edges: dict[str, Edges] = {"normal": ()}
        if self.thinking is not None:
            begin, end = self.thinking
            edges = {"normal": ((begin, "reasoning"),), "reasoning": ((end, "normal"),)}
        if tools and self.tool_marks is not None:
            call = (self.tool_marks[0], "tool")
            framed = any(part == "tool" for marks in frame.values() for _, part in marks)
            if not framed:
                edges["normal"] += (call,)
            if "reasoning" in edges:
                edges["reasoning"] += (call,)
        if self.xtml:
            edges["normal"] += tuple((mark, "normal") for mark in XTML_FRAME)
        for part, marks in frame.items():
            kept = tuple(edge for edge in marks if tools or edge[1] != "tool")
            edges[part] = edges.get(part, ()) + kept
        return edges

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Does a prompt that ends in this text leave the answer inside of opened reasoning?"""
        return self.thinking is not None and prompt_end.rstrip().endswith(self.thinking[0])


def infer_style(
    template: object, vocabulary: Collection[str], config: Mapping[str, Any], *, own_tools: bool
) -> AnswerStyle:
    """The style of a model by its chat template, the tokens of its vocabulary and its
    tokenizer_config.json."""
    xtml = all(mark in vocabulary for mark in XTML)
    thinking = next(
        (marks for known, marks in THINKING if all(token in vocabulary for token in known)),
        XTML_THINKING if xtml else None,
    )
    framed = config.get("chat_template_type")
    parser = config.get("tool_parser_type") or _infer_parser(template, vocabulary, xtml=xtml)
    return AnswerStyle(
        thinking,
        OWN_PARSER if own_tools else parser,
        own_tools,
        xtml,
        next((name for name in FRAMES if name in (parser, framed)), None),
    )


def _infer_parser(template: object, vocabulary: Collection[str], *, xtml: bool) -> str | None:
    if isinstance(template, str):
        for parser, texts in PARSERS_BY_TEMPLATE:
            if all(text in template for text in texts):
                return parser
    if xtml:
        return "kimi_k3"
    if "<|tool_call_start|>" in vocabulary and "<|tool_call_end|>" in vocabulary:
        return "pythonic"
    return None
