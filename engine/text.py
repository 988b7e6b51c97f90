"""Generated ids to text that ends where it should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.events import FinishReason, Request


class StopFinder:
    """Finds stop texts in a stream of pieces, holding back what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> tuple[str, bool]:
        """``(text to emit, whether a stop was reached)``; nothing from the stop on is emitted."""
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.found = min(found)
            self._held = ""
            return text[:at], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def rest(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


class Output:
    """Turns generated ids into text and decides where generation ends.

    It sees generated tokens only, so it ends at the same token whether the prompt was computed or
    restored.
    """

    def __init__(
        self, request: Request, tokenizer: Any | None, eos: frozenset[int], max_tokens: int
    ) -> None:
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer
        self._ends = frozenset(request.stop_tokens) | (frozenset() if request.ignore_eos else eos)
        self._finder = StopFinder(request.stop)
        self._left = max_tokens

    @property
    def stop_text(self) -> str | None:
        """The stop text that was met."""
        return self._finder.found

    def feed(self, token: int) -> tuple[str, FinishReason | None]:
        """``(printable text, reason to end here or None)``. An end token has no text."""
        self._left -= 1
        if token in self._ends:
            return "", "stop"
        piece = ""
        if self._detokenizer is not None:
            self._detokenizer.add_token(token)
            piece = self._detokenizer.last_segment
        text, stopped = self._finder.feed(piece)
        if stopped:
            self._detokenizer = None
            return text, "stop"
        return text, "length" if self._left == 0 else None

    def rest(self) -> str:
        """The text still held back, once nothing follows."""
        if self._detokenizer is None:
            return self._finder.rest()
        self._detokenizer.finalize()
        text, stopped = self._finder.feed(self._detokenizer.last_segment)
        return text if stopped else text + self._finder.rest()
