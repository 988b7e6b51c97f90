"""Tools of responses: as functions, which is all that models here know, and back to what the client
calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.prompt.parts import Data, tool_of
from engine.prompt.responses import shown_name
from kvdb.errors import UsageError

NO_PARAMETERS = {"type": "object", "properties": {}}
TEXT_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


@dataclass(frozen=True, slots=True)
class Called:
    """What the client calls a tool. A ``custom`` one takes text, and no object."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """``functions`` go into the prompt; ``called`` are the client's names by theirs. Types of tools
    that nobody here can run are ``left_out``: agents send them with their own."""

    functions: tuple[Data, ...] = ()
    called: Mapping[str, Called] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def tools_of(given: Sequence[Mapping[str, Any]]) -> ResponseTools:
    """The tools of a body, also those in namespaces. Raises UsageError."""
    functions: list[Data] = []
    called: dict[str, Called] = {}
    left_out: list[str] = []
    for tool, namespace in _flat(given):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            left_out.append(str(kind)[:60])
            continue
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise UsageError("A tool needs a name.")
        own = Called(name, namespace, kind == "custom")
        shown = shown_name(name, namespace)
        if shown in called:
            raise UsageError(f"There are two tools called {shown[:80]!r}.")
        called[shown] = own
        functions.append(_function(tool, shown, custom=own.custom))
    return ResponseTools(tuple(functions), called, tuple(left_out))


def _flat(given: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], str | None]]:
    """Each tool, with the namespace that it is in."""
    flat: list[tuple[Mapping[str, Any], str | None]] = []
    for tool in given:
        if tool.get("type") != "namespace":
            flat.append((tool, None))
            continue
        inner, name = tool.get("tools"), tool.get("name")
        if not isinstance(inner, list) or not isinstance(name, str):
            raise UsageError("A namespace needs a name and tools.")
        if not all(isinstance(each, Mapping) for each in inner):
            raise UsageError("A tool must be an object.")
        flat += [(each, name) for each in inner]
    return flat


def _function(tool: Mapping[str, Any], name: str, *, custom: bool) -> Data:
    if not custom:
        parameters = tool.get("parameters") or NO_PARAMETERS
        return tool_of({**tool, "name": name, "parameters": parameters})
    form = tool.get("format")
    grammar = form.get("definition") if isinstance(form, Mapping) else None
    about = [tool.get("description"), grammar and f"The grammar of its input:\n{grammar}"]
    description = "\n".join(str(text) for text in about if text)
    return tool_of({"name": name, "description": description, "parameters": TEXT_PARAMETERS})
