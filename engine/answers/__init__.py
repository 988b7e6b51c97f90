"""Answers: generated text to content, reasoning and tool calls, as it streams. Free of HTTP, and of
MLX until a tool call is parsed."""

from engine.answers.parser import AnswerParser
from engine.answers.pieces import (
    Piece,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallStart,
)
from engine.answers.style import AnswerStyle, infer_style

__all__ = [
    "AnswerParser",
    "AnswerStyle",
    "Piece",
    "ReasoningPiece",
    "TextPiece",
    "ToolCallArguments",
    "ToolCallStart",
    "infer_style",
]
