"""The text of a tool call to its name and arguments, by mlx-lm's own parsers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """``arguments`` are the text of a JSON object. ``id`` is the model's own, where it gives
    one."""

    name: str
    arguments: str
    id: str | None


def parse_calls(parser: str, text: str, tools: Tools) -> list[Call]:
    """The calls in ``text``, which stood between the marks of a call; none where it is malformed.
    ``parser`` is a module of mlx_lm.tool_parsers."""
    parse = importlib.import_module(f"mlx_lm.tool_parsers.{parser}").parse_tool_call
    functions = [dict(tool) for tool in tools if isinstance(tool.get("function"), Mapping)]
    try:
        parsed = parse(text, functions)
        return [_call(item) for item in (parsed if isinstance(parsed, list) else [parsed])]
    except Exception:  # whatever another's parser makes of whatever a model writes
        return []


def _call(parsed: Any) -> Call:
    """Raises ValueError or TypeError unless it is a call that can be written as JSON."""
    name, arguments, id_ = parsed["name"], parsed.get("arguments", {}), parsed.get("id")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("no name, or no object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not _is_unicode(text):  # a lone surrogate: its escape is JSON too
        text = json.dumps(arguments, allow_nan=False)
    name.encode()
    return Call(name, text, id_ if isinstance(id_, str) and _is_unicode(id_) else None)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
