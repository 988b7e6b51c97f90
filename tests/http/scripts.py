"""Answers that a test dictates: everything but the choice of tokens is real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import Request
from engine.prompt.tokenizer import load_tokenizer

END = "<|im_end|>"


class Script:
    """Give it to ``start(adapt=...)``: while ``text`` is set, each answer is that text."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(folder)
        self.text: str | None = None

    def __call__(self, request: Request) -> Request:
        if self.text is None:
            return request
        tokens = self._tokenizer.encode(self.text + END, special=False).ids
        return replace(request, processors=(lambda: _play(tokens),))


def _play(tokens: list[int]) -> Callable[[tuple[int, ...], Any], Any]:
    def process(before: tuple[int, ...], logits: Any) -> Any:
        import mlx.core as mx

        token = tokens[min(len(before), len(tokens) - 1)]
        return mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -mx.inf)[None]

    return process
