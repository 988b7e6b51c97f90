"""What an answer is made of, in the order it comes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text for the user, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """What the model thinks before it answers, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins; ``index`` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Arguments of call ``index``; joined, the pieces of one call are the text of a JSON object."""

    index: int
    text: str


Piece = TextPiece | ReasoningPiece | ToolCallStart | ToolCallArguments
