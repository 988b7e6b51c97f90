"""Chat templates: messages to text, and where each message and tool lies in it.

The environment is that of transformers' ``apply_chat_template``, which takes a second to import;
a test holds the two equal. A template comes with a model, from anywhere: it runs in a sandbox, on
plain data only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from kvdb.errors import PromptError

Data = dict[str, Any]
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
MARKER = "kvdb_mark"
# What a template does wrong, on purpose or by mistake.
REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
# Two characters from a private plane: a prompt that has them itself gets no spans.
_OPEN, _CLOSE = "\U000f5a3e", "\U000f5a3f"
_MARK = re.compile(f"{_OPEN}([mt])([0-9]+)([se]){_CLOSE}")


@dataclass(frozen=True, slots=True)
class Span:
    """Characters ``start`` to ``end`` of the rendered text came from one message or tool."""

    kind: str
    index: int
    start: int
    end: int


class ChatTemplate:
    """A compiled chat template with what its tokenizer gives it: special tokens, and whether the
    model thinks. Raises PromptError when ``source`` is not a template."""

    def __init__(
        self, source: str | Mapping[str, str], specials: Mapping[str, Any], thinking: bool
    ) -> None:
        self.source = source
        self.specials = dict(specials)
        self.thinking = thinking

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a prompt. Raises PromptError when the template refuses the messages."""
        return self._render(messages, tools, add_generation_prompt, options or {}, marked=False)

    def spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        text: str,
    ) -> list[Span] | None:
        """Where messages and tools lie in ``text``, which is what ``render`` gives, in order.

        They are found by rendering once more with a mark at both ends of every round of a loop
        over them. None when ``text`` cannot be had that way: then nothing is known.
        """
        try:
            marked = self._render(messages, tools, True, options or {}, marked=True)
        except PromptError:
            return None
        if _MARK.sub("", marked) != text:
            return None
        starts: dict[tuple[str, int], int] = {}
        ends: dict[tuple[str, int], int] = {}
        open_: set[tuple[str, int]] = set()
        removed = 0
        for mark in _MARK.finditer(marked):
            at, key = mark.start() - removed, (mark[1], int(mark[2]))
            removed += len(mark[0])
            # Marks may nest: the outer ones count. And templates look through the messages before
            # they write them: the last round counts.
            if mark[3] == "e":
                ends[key] = at
                open_.discard(key)
            elif key not in open_:
                starts[key] = at
                open_.add(key)
        found = [
            Span("message" if kind == "m" else "tool", index, start, ends[kind, index])
            for (kind, index), start in starts.items()
            if ends.get((kind, index), start) > start
        ]
        return sorted(found, key=lambda span: (span.start, -span.end))

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
        *,
        marked: bool,
    ) -> str:
        compiled = self._default if tools is None else self._tool_use
        try:
            chat = [_message(message) for message in messages]
            schemas = None if tools is None else [plain(dict(tool)) for tool in tools]
            mark = _marker(chat, schemas or []) if marked else _no_mark
            variables = {**self.specials, "enable_thinking": self.thinking, **plain(dict(options))}
            return compiled.render(
                **{
                    **variables,
                    "messages": chat,
                    "tools": schemas,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    MARKER: mark,
                }
            )
        except RecursionError as error:
            raise PromptError("The messages are nested too deeply for the template.") from error
        except REFUSALS as error:
            raise PromptError(f"The chat template refuses these messages: {error}.") from error

    @cached_property
    def has_tools(self) -> bool:
        """Does the template itself know of tools?"""
        sources = [self.source] if isinstance(self.source, str) else list(self.source.values())
        return any(map(mentions_tools, sources))

    @cached_property
    def _default(self) -> jinja2.Template:
        source = self.source
        if isinstance(source, str):
            return _compile(source)
        if "default" not in source:
            raise PromptError("The model's chat templates have no default one.")
        return _compile(source["default"])

    @cached_property
    def _tool_use(self) -> jinja2.Template:
        if isinstance(self.source, str) or "tool_use" not in self.source:
            return self._default
        return _compile(self.source["tool_use"])


def mentions_tools(source: str) -> bool:
    """Does a template have the variable ``tools``? A damaged one says so when it is rendered."""
    try:
        tree = _environment().parse(source)
    except jinja2.TemplateError:
        return True
    return any(name.name == "tools" for name in tree.find_all(nodes.Name))


def _message(message: Mapping[str, Any]) -> Data:
    """A message as templates get it: without nulls, reasoning under every name for it."""
    given: Data = plain({key: value for key, value in message.items() if value is not None})
    reasoning = next((given[key] for key in REASONING_FIELDS if given.get(key) is not None), None)
    if reasoning is not None:
        given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
    return given


def plain(value: Any) -> Any:
    """Plain JSON types, copied: the sandbox does not know what else may be dangerous."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


# -- marks ---------------------------------------------------------------------------------------

Mark = Callable[[object, str], str]


def _no_mark(_value: object, _side: str) -> str:
    return ""


def _marker(chat: Sequence[Data], tools: Sequence[Data]) -> Mark:
    """Marks for the very objects that the template loops over."""
    known = {id(message): f"m{index}" for index, message in enumerate(chat)}
    known |= {id(tool): f"t{index}" for index, tool in enumerate(tools)}

    def mark(value: object, side: str) -> str:
        name = known.get(id(value))
        return "" if name is None else f"{_OPEN}{name}{side}{_CLOSE}"

    return mark


def _compile(source: str) -> jinja2.Template:
    environment = _environment()
    try:
        tree = environment.parse(source)
        _mark_loops(tree, None)
        code = environment.compile(tree)
    except jinja2.TemplateError as error:
        raise PromptError(f"The chat template is damaged: {error}.") from error
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


def _mark_loops(node: nodes.Node, target: str | None) -> None:
    """Call the marker at both ends of every round of every loop, also where it is left early."""
    for name, value in list(node.iter_fields()):
        if not isinstance(value, list):
            if isinstance(value, nodes.Node):
                _mark_loops(value, target)
            continue
        inner = target
        if isinstance(node, nodes.For):
            inner = node.target.name if isinstance(node.target, nodes.Name) else None
            inner = inner if name == "body" else target
        body: list[Any] = []
        for child in value:
            if isinstance(child, nodes.Continue | nodes.Break) and inner is not None:
                body.append(_call_marker(inner, "e", child.lineno))
            if isinstance(child, nodes.Node):
                _mark_loops(child, inner)
            body.append(child)
        if isinstance(node, nodes.For) and name == "body" and inner is not None:
            first, last = (_call_marker(inner, side, node.lineno) for side in "se")
            body = [first, *body, last]
        setattr(node, name, body)


def _call_marker(target: str, side: str, line: int) -> nodes.Node:
    arguments: list[nodes.Expr] = [nodes.Name(target, "load"), nodes.Const(side)]
    call = nodes.Call(nodes.Name(MARKER, "load"), arguments, [], None, None)
    return nodes.Output([call]).set_lineno(line)


# -- the environment of transformers -------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: says what the model wrote; here only its content matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` without the attributes of the class, which lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> Data:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> Data:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` without underscored attributes, which lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format_: datetime.now().strftime(format_)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


@jinja2.pass_context
def _tojson(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML. Tools are marked here too: not every template loops over them."""
    mark = context.get(MARKER, _no_mark)

    def dump(item: Any) -> str:
        text = json.dumps(
            item,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        return f"{mark(item, 's')}{text}{mark(item, 'e')}"

    if isinstance(value, list) and indent is None:
        comma = ", " if separators is None else separators[0]
        return f"[{comma.join(map(dump, value))}]"
    return dump(value)


def prefix_renders(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
    counts: Sequence[int],
) -> Iterator[tuple[int, str]]:
    """``(k, text of the first k messages)`` for each of ``counts`` that the template accepts."""
    for count in counts:
        try:
            text = template.render(
                messages[:count], tools, add_generation_prompt=False, options=options
            )
        except PromptError:
            continue  # some want the turns to alternate, or to end with a user
        yield count, text
