"""How a model is made to call a tool: the form in which it writes calls, as a guide."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.answers.style import AnswerStyle
from engine.guide import CallForm, Guide
from kvdb.errors import UsageError

# What stands before and behind a call's arguments, where these are JSON: by module of
# mlx_lm.tool_parsers. {name} is the tool's, {quoted} the same as JSON.
FORMS: Mapping[str, tuple[str, str]] = {
    "json_tools": (
        '<tool_call>\n{{"name": {quoted}, "arguments": ',
        "}\n</tool_call>",
    ),
    "longcat": (
        '<longcat_tool_call>\n{{"name": {quoted}, "arguments": ',
        "}\n</longcat_tool_call>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "mistral": ("[TOOL_CALLS]{name}[ARGS]", ""),
}


def call_guide(
    style: AnswerStyle | None,
    tools: Sequence[Mapping[str, Any]],
    name: str | None,
    most: int,
    otherwise: Guide | None = None,
) -> Guide:
    """A guide to calls of ``tools`` (as OpenAI has them), or of the one called ``name``, that a
    model in ``style`` writes; or to JSON, as ``otherwise`` says. Raises UsageError where there is
    no such tool, or no such form."""
    parser = None if style is None else style.tool_parser
    form = None if parser is None else FORMS.get(parser)
    if form is None:
        raise UsageError(
            "This model cannot be made to call a tool: the form of its calls "
            f"({parser or 'none'}) has no grammar here; leave tool_choice at auto, without a "
            "format of the answer."
        )
    forms = []
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        if name in (None, function["name"]):
            quoted = json.dumps(function["name"])
            begin = form[0].format(name=function["name"], quoted=quoted)
            schema = function.get("parameters") or {"type": "object"}
            forms.append(CallForm(begin, schema, form[1]))
    if not forms:
        raise UsageError(
            "There is no tool to call." if name is None else f"There is no tool {name!r} to call."
        )
    return Guide.calls(forms, most=most, otherwise=otherwise)
