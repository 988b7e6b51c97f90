"""An incremental parser of answers: text as it is generated, to pieces.

What comes out does not depend on how the text is cut: a mark counts when it stands where nothing
longer, begun earlier, can still become one. Some whitespace belongs to the marks, since chat
templates write it themselves when the message comes back: newlines beside those of reasoning, one
before a tool call, any between and behind calls. Everything else comes out, of a malformed or
unfinished call its marks too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.answers.calls import Tools, parse_calls
from engine.answers.pieces import (
    Piece,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallStart,
)
from engine.answers.style import AnswerStyle

NEWLINES = "\r\n"
SPACE = " \t\r\n"


@dataclass(slots=True)
class _Call:
    """A call that was begun with ``mark``, in ``part``, and what followed so far."""

    part: str
    mark: str
    text: str = ""


class _Marks:
    """Finds the first of some marks in a text that may go on."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = [mark for mark in marks if mark]
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first))) if self._marks else None
        self._longest = max(map(len, self._marks), default=1)

    def find(self, text: str, *, final: bool) -> tuple[int, str | None]:
        """``(characters that belong to no mark, the mark behind them)``. Without a mark, what may
        still become one is not among those characters, unless the text is ``final``."""
        found = None if self._any is None else self._any.search(text)
        at = len(text) if final else self._begun(text)
        if found is not None and (found.start() < at or final):
            return found.start(), found[0]
        return at, None

    def _begun(self, text: str) -> int:
        """Where a mark may have begun that is not whole yet; the text's end if nowhere."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[at:]
            if any(len(mark) > len(end) and mark.startswith(end) for mark in self._marks):
                return at
        return len(text)


class AnswerParser:
    """One answer of a model in ``style`` to a request with ``tools``; without any, a call is text.

    ``new_id`` makes the ids of calls to which the model gives none. ``in_reasoning``: the prompt
    ended inside of opened reasoning (:meth:`AnswerStyle.opens_reasoning`).
    """

    def __init__(
        self,
        style: AnswerStyle,
        tools: Tools | None,
        new_id: Callable[[], str],
        *,
        in_reasoning: bool = False,
    ) -> None:
        self._tools = tools or ()
        self._new_id = new_id
        self._parser = style.tool_parser if style.tool_marks and tools else None
        self._call_end = style.tool_marks[1] if style.tool_marks and tools else ""
        self._edges = {
            part: dict(edges) for part, edges in style.edges(tools=self._parser is not None).items()
        }
        self._marks = {part: _Marks(list(edges)) for part, edges in self._edges.items()}
        self._marks["tool"] = _Marks([self._call_end])
        # In the text of what turned out to be no call, only other marks count.
        self._other_marks = {
            part: _Marks([mark for mark, to in edges.items() if to != "tool"])
            for part, edges in self._edges.items()
        }
        in_reasoning = in_reasoning and "reasoning" in self._edges
        self._part = "reasoning" if in_reasoning else style.first_part
        self._rest = ""  # not looked at yet, or maybe the beginning of a mark
        self._call: _Call | None = None
        self._calls = 0
        self._dropping = NEWLINES if in_reasoning else ""  # at the start of what comes next
        self._space = ""  # held back: it goes where a mark follows
        self._spoke = False  # text that a call may follow
        self._header = ""

    @property
    def calls(self) -> int:
        """How many tool calls have come out."""
        return self._calls

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain with ``text``."""
        self._rest += text
        return _joined(self._parse(final=False))

    def end(self) -> list[Piece]:
        """What was held back, now that the answer is over."""
        pieces = self._parse(final=True)
        if self._call is not None:
            call, self._call = self._call, None
            parsed = [] if self._call_end else self._parsed(call.text)
            if not parsed:
                self._part = call.part
                parsed = self._literally(call.mark + call.text)
            pieces += parsed
        pieces += self._let_go()
        if self._header:
            pieces.append(TextPiece(self._header))
            self._header = ""
        return _joined(pieces)

    def _parse(self, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._rest:
            part = self._part if self._call is None else "tool"
            count, mark = self._marks[part].find(self._rest, final=final)
            before, self._rest = self._rest[:count], self._rest[count + len(mark or "") :]
            if self._call is None:
                pieces += self._emit(before)
                if mark is not None:
                    pieces += self._pass(mark)
            else:
                self._call.text += before
                if mark is not None:
                    pieces += self._end_call(self._call, mark)
            if mark is None:
                break
        return pieces

    def _pass(self, mark: str) -> list[Piece]:
        """A mark was met outside of a call."""
        to = self._edges[self._part][mark]
        if to == "tool":
            self._call = _Call(self._part, mark)
            return []
        pieces: list[Piece] = []
        if "reasoning" in (self._part, to):
            held = self._space.rstrip(NEWLINES)
            self._space = ""
            pieces = self._piece(held)
            self._dropping, self._spoke = NEWLINES, False
        self._part, self._header = to, ""
        return pieces

    def _end_call(self, call: _Call, mark: str) -> list[Piece]:
        self._call = None
        if pieces := self._parsed(call.text):
            return pieces
        self._part = call.part
        # A mark that was only mentioned, and then meant.
        at = call.text.rfind(call.mark)
        if at >= 0:
            pieces = self._literally(call.mark + call.text[:at])
            if parsed := self._parsed(call.text[at + len(call.mark) :]):
                return pieces + parsed
            return pieces + self._literally(call.text[at:] + mark)
        return self._literally(call.mark + call.text + mark)

    def _parsed(self, text: str) -> list[Piece]:
        """The pieces of the calls in a text, none if it is malformed."""
        if self._parser is None:
            return []
        calls = parse_calls(self._parser, text, self._tools)
        if not calls:
            return []
        pieces = self._piece(self._space.removesuffix("\n")) if self._spoke else []
        for call in calls:
            pieces.append(ToolCallStart(self._calls, call.id or self._new_id(), call.name))
            pieces.append(ToolCallArguments(self._calls, call.arguments))
            self._calls += 1
        self._part, self._header, self._space, self._dropping = "normal", "", "", SPACE
        self._spoke = False
        return pieces

    def _literally(self, text: str) -> list[Piece]:
        """What looked like a call, as the text that it is."""
        pieces: list[Piece] = []
        while text:
            count, mark = self._other_marks[self._part].find(text, final=True)
            pieces += self._emit(text[:count])
            text = text[count + len(mark or "") :]
            if mark is not None:
                pieces += self._pass(mark)
        return pieces

    def _emit(self, text: str) -> list[Piece]:
        """Text of the part that the answer is in, but for whitespace that a mark may follow."""
        if self._dropping and text:
            text = text.lstrip(self._dropping)
            if text:
                self._dropping = ""
        if not text:
            return []
        if self._part == "header":
            self._header += text
            return []
        text = self._space + text
        kept = text.rstrip(SPACE)
        self._space = text[len(kept) :]
        self._spoke = self._part == "normal" and (self._spoke or bool(kept))
        return self._piece(kept)

    def _let_go(self) -> list[Piece]:
        text, self._space = self._space, ""
        return self._piece(text)

    def _piece(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [ReasoningPiece(text) if self._part == "reasoning" else TextPiece(text)]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbouring pieces of one kind as one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, TextPiece) and isinstance(last, TextPiece):
            joined[-1] = TextPiece(last.text + piece.text)
        elif isinstance(piece, ReasoningPiece) and isinstance(last, ReasoningPiece):
            joined[-1] = ReasoningPiece(last.text + piece.text)
        else:
            joined.append(piece)
    return joined
