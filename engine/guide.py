"""What an answer must be: JSON, text of a grammar, a tool call. Descriptions only, free of MLX.

engine/tokenmasks.py makes masks over a model's tokens of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvdb.errors import UsageError

Kind = Literal["schema", "regex", "lark", "calls"]
# Between JSON's tokens: a space, or a new line with its indent. Free whitespace would let a model
# that has lost its way write blanks until it is cut off.
WHITESPACE = r"\x20|\n\x20{0,24}"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes the call of one tool: ``begin`` (its name is in it), the arguments as
    JSON by ``schema``, ``end``."""

    begin: str
    schema: Mapping[str, Any] | bool
    end: str


@dataclass(frozen=True, slots=True)
class Guide:
    """Make one by its class methods. Equal ones are compiled once for a model.

    Whether a model can follow it, and what it says is well formed, is found out when it is
    compiled: requests then end with UsageError.
    """

    kind: Kind
    source: str

    @classmethod
    def json(cls) -> Guide:
        """Any JSON object."""
        return cls.schema({"type": "object"})

    @classmethod
    def schema(cls, schema: Mapping[str, Any] | str) -> Guide:
        """JSON by a JSON Schema, given as an object or its text. Raises UsageError for text that
        is no JSON."""
        if isinstance(schema, str):
            try:
                json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"The JSON schema is not JSON: {error}.") from error
            return cls("schema", schema)
        return cls("schema", _dumped(schema))

    @classmethod
    def regex(cls, pattern: str) -> Guide:
        """Text that a regular expression (of Rust's regex crate) matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Guide:
        """Text of a grammar in llguidance's form of Lark, from its rule ``start``."""
        return cls("lark", grammar)

    @classmethod
    def calls(
        cls, forms: Sequence[CallForm], *, most: int = 1, otherwise: Guide | None = None
    ) -> Guide:
        """From one to ``most`` calls, each of one of ``forms``, with new lines between them; or
        JSON, as ``otherwise`` says, which was made by :meth:`json` or :meth:`schema`."""
        if not forms or most < 1:
            raise UsageError("There is no tool that could be called.")
        source: dict[str, Any] = {"forms": [asdict(form) for form in forms], "most": most}
        if otherwise is not None:
            source["otherwise"] = json.loads(otherwise.source)
        return cls("calls", _dumped(source))

    @classmethod
    def tool_call(
        cls, tools: Sequence[Mapping[str, Any]], name: str | None = None, *, most: int = 1
    ) -> Guide:
        """Calls of ``tools`` (as OpenAI has them), or of the one called ``name``, in the form that
        Hermes and Qwen models write and mlx-lm's ``json_tools`` reads. For other models give
        :meth:`calls` their own. Raises UsageError where there is no such tool."""
        functions = [_function(tool) for tool in tools]
        forms = [
            CallForm(
                f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": ',
                function.get("parameters") or {"type": "object"},
                "}\n</tool_call>",
            )
            for function in functions
            if name in (None, function["name"])
        ]
        if not forms and name is not None:
            raise UsageError(f"There is no tool {name!r} to call.")
        return cls.calls(forms, most=most)


def grammar(guide: Guide, special: Mapping[str, int]) -> str:
    """The grammar that llguidance takes; ``special`` are tokens that no plain text gives, by what
    they look like. Raises UsageError for what is no JSON Schema at all."""
    from llguidance import LLMatcher

    if guide.kind == "regex":
        return LLMatcher.grammar_from_regex(guide.source)
    if guide.kind == "lark":
        return LLMatcher.grammar_from_lark(guide.source)
    if guide.kind == "calls":
        return LLMatcher.grammar_from_lark(_calls(json.loads(guide.source), special))
    try:
        return LLMatcher.grammar_from_json_schema(
            guide.source, overrides={"whitespace_pattern": WHITESPACE}
        )
    except ValueError as error:
        raise UsageError(f"The JSON schema cannot be followed: {error}.") from error


def _calls(source: Mapping[str, Any], special: Mapping[str, int]) -> str:
    names = [f"call{number}" for number in range(len(source["forms"]))]
    more = f' ("\\n" call){{0,{source["most"] - 1}}}' if source["most"] > 1 else ""
    start, rules = f"start: call{more}", [f"call: {' | '.join(names)}"]
    if "otherwise" in source:
        start += " | answer"
        rules.append(f"answer: {_inline(source['otherwise'])}")
    for name, form in zip(names, source["forms"], strict=True):
        begin, end = _literal(form["begin"], special), _literal(form["end"], special)
        rules.append(f"{name}: {begin} {_inline(form['schema'])} {end}")
    rules.insert(0, start)
    return "\n".join(rules) + "\n"


def _inline(schema: Mapping[str, Any] | bool) -> str:
    """JSON by a schema as a part of a rule."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"%json {json.dumps(schema)}"


def _literal(text: str, special: Mapping[str, int]) -> str:
    """``text`` as a sequence of Lark's terms."""
    terms: list[str] = []
    while text:
        found = [(text.find(name), -len(name), name) for name in special if name in text]
        at, _, name = min(found, default=(len(text), 0, ""))
        if at:
            terms.append(json.dumps(text[:at], ensure_ascii=False))
        if name:
            terms.append(f"<[{special[name]}]>")
        text = text[at + len(name) :]
    return " ".join(terms)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError("A tool needs a name.")
    return function


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"The schema is not JSON: {error}.") from error
