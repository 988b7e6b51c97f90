"""Where the messages and tools of a prompt end, as exact token indices.

Spans of characters come from the template, token ends from one tokenization with offsets, so the
cost grows with the prompt and not with its square. Whether a template is *prefix-stable* (what it
writes for a message does not depend on later ones) is another question, asked by rendering
prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.prompt.template import ChatTemplate, Span, plain, prefix_renders
from kvdb.segments import Segment, content_digest

if TYPE_CHECKING:
    from engine.events import Mark

# Prefixes are rendered at most this often: each costs as much as what it holds.
MOST_RENDERS = 64
STABILITY_RENDERS = 16

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


def chat_segments(
    template: ChatTemplate,
    messages: Messages,
    tools: Tools | None,
    options: Mapping[str, Any],
    text: str,
    ends: npt.NDArray[np.int64],
) -> list[Segment]:
    """The parts of a rendered chat ``text``, in order and without gaps; ``ends`` are the character
    ends of its tokens. Empty where the template does not tell.

    A token that straddles two parts belongs to the second, so that the tokens up to a part's end
    depend on nothing behind it.
    """
    spans = part_spans(template, messages, tools, options, text)
    if not spans:
        return []
    segments: list[Segment] = []
    start = done = 0
    for owner, end in _pieces(spans, len(text)):
        count = int(np.searchsorted(ends, end, side="right"))
        if end == len(text):
            count = len(ends)
        if count > done:
            # Many templates write the first message outside their loop, when it is the system's.
            if owner is None and not segments and _is_system(messages[0]):
                owner = Span("message", 0, start, end)
            segments.append(_segment(owner, count, messages, tools or (), text[start:end]))
            done = count
        start = end
    return segments


def part_spans(
    template: ChatTemplate,
    messages: Messages,
    tools: Tools | None,
    options: Mapping[str, Any],
    text: str,
) -> list[Span]:
    """Where messages and tools lie in a rendered chat ``text``, in order; none where the template
    does not tell."""
    spans = template.spans(messages, tools, options=options, text=text)
    if not spans or not any(span.kind == "message" for span in spans):
        spans = _by_prefixes(template, messages, tools, options, text)
    return spans


def answer_starts(
    template: ChatTemplate,
    messages: Messages,
    tools: Tools | None,
    options: Mapping[str, Any],
    text: str,
) -> list[int]:
    """Where in a rendered chat ``text`` the assistant's messages begin, behind what the template
    also writes to invite an answer; without those before which it writes something else."""
    if not any(message.get("role") == "assistant" for message in messages):
        return []
    spans = part_spans(template, messages, tools, options, text)
    spans = [span for span in spans if span.kind == "message"]
    cue = text[max((span.end for span in spans), default=len(text)) :]
    return [
        span.start + len(cue)
        for span in spans
        if messages[span.index].get("role") == "assistant" and text.startswith(cue, span.start)
    ]


def unstable_at(
    template: ChatTemplate,
    messages: Messages,
    tools: Tools | None,
    options: Mapping[str, Any],
    text: str,
) -> int | None:
    """How many messages it takes until the template has written other text for the first of them
    than in ``text``, the render of all; None where every prefix that was tried is kept.

    With more than STABILITY_RENDERS messages, only that many prefixes, evenly spread, are tried.
    """
    counts = list(range(1, len(messages)))
    if len(counts) > STABILITY_RENDERS:
        counts = sorted(
            {counts[int(i)] for i in np.linspace(0, len(counts) - 1, STABILITY_RENDERS)}
        )
    for count, prefix in prefix_renders(template, messages, tools, options, counts):
        if not text.startswith(prefix):
            return count
    return None


def mark_end(
    mark: Mark,
    messages: Messages,
    segments: Sequence[Segment],
    text: str,
    ends: npt.NDArray[np.int64],
) -> int:
    """How many tokens lie before a mark in a chat rendered as ``text``, whose parts are
    ``segments`` and whose tokens end at the characters ``ends``. 0 where it cannot be told."""
    if mark.tool:
        return next((p.end for p in segments if p.kind == "tool" and p.index == mark.index), 0)
    parts = [part for part in segments if part.kind in ("system", "message")]
    if mark.characters is None:
        later = next((p for p in parts if p.index is not None and p.index > mark.index), None)
        if later is None:  # behind it there is what the template writes before the answer
            return max((p.end for p in segments if p.kind != "template"), default=0)
        return _before(later, segments)
    own = next((part for part in parts if part.index == mark.index), None)
    content = messages[mark.index].get("content")
    if own is None or not isinstance(content, str):
        return 0
    before = _before(own, segments)
    known = content[: mark.characters].strip()  # templates may trim it
    begin = int(ends[before - 1]) if before else 0
    at = text.find(known, begin)
    if not known or at < 0:
        return before
    end = int(np.searchsorted(ends, at + len(known), side="right"))
    return end if before <= end <= own.end else before


def _before(part: Segment, segments: Sequence[Segment]) -> int:
    """How many tokens lie before a part."""
    return max((other.end for other in segments if other.end < part.end), default=0)


def _by_prefixes(
    template: ChatTemplate,
    messages: Messages,
    tools: Tools | None,
    options: Mapping[str, Any],
    text: str,
) -> list[Span]:
    """Message ends by rendering ever longer prefixes, for templates that loop over numbers. A
    prefix that the whole does not begin with says nothing: its message has no span of its own."""
    if len(messages) > MOST_RENDERS:
        return []
    spans: list[Span] = []
    done = 0
    counts = range(1, len(messages) + 1)
    for count, prefix in prefix_renders(template, messages, tools, options, counts):
        if text.startswith(prefix) and len(prefix) > done:
            spans.append(Span("message", count - 1, done, len(prefix)))
            done = len(prefix)
    return spans


def _pieces(spans: Sequence[Span], length: int) -> Iterator[tuple[Span | None, int]]:
    """``(innermost span, end)`` of consecutive pieces that cover ``length`` characters."""
    open_: list[Span] = []
    at = 0

    def close_until(position: int) -> Iterator[tuple[Span | None, int]]:
        nonlocal at
        while open_ and open_[-1].end <= position:
            span = open_.pop()
            if span.end > at:
                yield span, span.end
                at = span.end

    for span in spans:
        yield from close_until(span.start)
        if span.start > at:
            yield (open_[-1] if open_ else None), span.start
            at = span.start
        if span.end > at:
            open_.append(span)
    yield from close_until(length)
    if at < length:
        yield None, length


def _segment(owner: Span | None, end: int, messages: Messages, tools: Tools, text: str) -> Segment:
    if owner is None:
        return Segment("template", end, digest=content_digest(text))
    if owner.kind == "tool":
        tool = tools[owner.index]
        name, digest = tool_name(tool), content_digest(plain(tool))
        return Segment("tool", end, index=owner.index, name=name, digest=digest)
    message = messages[owner.index]
    kind = "system" if _is_system(message) else "message"
    role = str(message.get("role"))
    return Segment(kind, end, role=role, index=owner.index, digest=_digest(message))


def _is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("system", "developer")


def _digest(message: Mapping[str, Any]) -> str:
    return content_digest(plain({k: value for k, value in message.items() if value is not None}))


def tool_name(tool: Mapping[str, Any]) -> str | None:
    """The name of a tool, inside ``function`` or beside it."""
    function = tool.get("function")
    name = (function if isinstance(function, Mapping) else tool).get("name")
    return name if isinstance(name, str) else None
