"""Prompts to token ids, and generated ids to text that ends where it should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.events import FinishReason, Request
from kvdb.errors import PromptError, UsageError
from kvdb.identity import Tokens, as_tokens

# What encode decides itself: other values would change what a prompt is.
RESERVED_OPTIONS = {"tokenize", "add_generation_prompt", "return_dict", "return_tensors"}


def encode(request: Request, tokenizer: Any | None, context: int | None, vocabulary: int) -> Tokens:
    """The token ids of a request's prompt. Raises PromptError when it is empty, longer than the
    model's context, holds unknown ids, or needs a tokenizer or chat template that is not there."""
    given = request.tokens if request.tokens is not None else _ids(request, tokenizer)
    try:
        tokens = as_tokens(given)
    except (UsageError, OverflowError, ValueError) as error:
        raise PromptError("A prompt's tokens must be ids from 0 to 4294967295.") from error
    if not len(tokens):
        raise PromptError("The prompt is empty.")
    if context is not None and len(tokens) > context:
        raise PromptError(
            f"The prompt has {len(tokens)} tokens, and the model's context holds "
            f"{context}: shorten it."
        )
    if int(tokens.max()) >= vocabulary:
        raise PromptError(
            f"Token id {int(tokens.max())} is not in the model's vocabulary of {vocabulary}."
        )
    return tokens


def _ids(request: Request, tokenizer: Any | None) -> Sequence[int]:
    if tokenizer is None:
        raise PromptError("The model has no tokenizer, so its prompts must be token ids.")
    if request.text is not None:
        if not request.text:
            return []
        _check_text(request.text)
        bos = tokenizer.bos_token
        ids: Sequence[int] = tokenizer.encode(
            request.text, add_special_tokens=bos is None or not request.text.startswith(bos)
        )
        return ids
    if not request.messages:
        return []
    if not tokenizer.has_chat_template:
        raise PromptError("The model has no chat template: give its prompt as text.")
    options: dict[str, Any] = dict(request.template_options)
    if reserved := RESERVED_OPTIONS & options.keys():
        raise UsageError(f"The template option {min(reserved)} is not yours to set.")
    try:
        if request.tools is not None:
            options["tools"] = [dict(tool) for tool in request.tools]
        messages = [dict(message) for message in request.messages]
        for message in messages:
            for value in message.values():
                if isinstance(value, str):
                    _check_text(value)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except (ValueError, TypeError, KeyError, _template_error()) as error:
        raise PromptError(f"The chat template refuses these messages: {error}.") from error
    return ids


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise PromptError("A prompt must be text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError("The prompt holds bytes that are not valid text.") from error


def _template_error() -> type[Exception]:
    from jinja2.exceptions import TemplateError

    return TemplateError


class StopFinder:
    """Finds stop texts in a stream of pieces, holding back what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """``(text to emit, whether a stop was reached)``; nothing from the stop on is emitted."""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
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
