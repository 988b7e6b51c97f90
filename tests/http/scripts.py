"""Answers that a test dictates: everything but the choice of tokens is real."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import Request
from engine.prompt.tokenizer import load_tokenizer

END = "<|im_end|>"


class Script:
    """Give it to ``start(adapt=...)``: while ``text`` is set, each answer is that text. With
    ``width`` in tokens of so many characters at most, as a model may choose them and a tokenizer
    would not."""

    def __init__(self, folder: Path, *, width: int | None = None) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._width = width
        self.text: str | None = None

    def tokens(self, text: str) -> list[int]:
        """The ids of an answer, to its end."""
        parts = [text + END]
        if self._width is not None:
            parts = re.findall(
                rf"</?think>|{re.escape(END)}|(?s:(?!<).){{1,{self._width}}}|<", parts[0]
            )
        return [id_ for part in parts for id_ in self._tokenizer.encode(part, special=False).ids]

    def __call__(self, request: Request) -> Request:
        if self.text is None:
            return request
        tokens = self.tokens(self.text)
        return replace(request, processors=(lambda: _play(tokens),))


def _play(tokens: list[int]) -> Callable[[tuple[int, ...], Any], Any]:
    def process(before: tuple[int, ...], logits: Any) -> Any:
        import mlx.core as mx

        token = tokens[min(len(before), len(tokens) - 1)]
        return mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -mx.inf)[None]

    return process
