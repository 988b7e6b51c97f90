"""A request's prompt: token ids, and the parts they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.prompt.boundaries import answer_starts, chat_segments, mark_end, unstable_at
from engine.prompt.splice import Piece, encode_spliced, joined_ids
from engine.prompt.template import mentions_tools
from engine.prompt.tokenizer import template_source
from engine.prompt.tools import ToolTemplate, uses_tools
from kvdb.errors import PromptError, UsageError
from kvdb.identity import Tokens, as_tokens
from kvdb.segments import Segment, content_digest

if TYPE_CHECKING:
    from engine.events import Mark, Request
    from engine.prompt.memory import Recall, Splice
    from engine.prompt.tokenizer import PromptTokenizer

# What encode decides itself: other values would change what a prompt is.
RESERVED_OPTIONS = {"tokenize", "add_generation_prompt", "return_dict", "return_tensors"}
# Texts up to here are tokenized to see whether they are too long.
LONG_TEXT = 1_000_000


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, with what is needed to say later what they were."""

    tokens: Tokens
    request: Request
    text: str | None = None
    pieces: Sequence[Piece] = field(default=(), repr=False)
    tokenizer: PromptTokenizer | None = field(default=None, repr=False)

    def segments(self) -> list[Segment]:
        """The parts of the prompt (see kvdb.segments); empty where they cannot be told. Takes
        10 to 20 ms for 32 K tokens."""
        request, count = self.request, len(self.tokens)
        if request.tokens is not None:
            digest = content_digest(self.tokens.tobytes().hex())
            return [Segment("tokens", count, digest=digest)]
        if request.text is not None:
            return [Segment("text", count, digest=content_digest(request.text))]
        template = None if self.tokenizer is None else self.tokenizer.template
        if template is None or not self.pieces or self.text is None:
            return []
        return chat_segments(
            template,
            request.messages or (),
            request.tools,
            request.template_options,
            self.text,
            self._token_ends(),
        )

    def _token_ends(self) -> npt.NDArray[np.int64]:
        """Where each token ends in the text, in characters."""
        return np.concatenate([piece.ends() for piece in self.pieces])

    def mark_ends(self, marks: Sequence[Mark]) -> list[int]:
        """How many tokens lie before each mark; 0 where that cannot be told."""
        request = self.request
        if not marks or not request.messages or not self.pieces or self.text is None:
            return [0] * len(marks)
        segments, ends = self.segments(), self._token_ends()
        return [mark_end(mark, request.messages, segments, self.text, ends) for mark in marks]

    def unstable_at(self) -> int | None:
        """See :func:`engine.prompt.boundaries.unstable_at`; None for what is no chat."""
        template = None if self.tokenizer is None else self.tokenizer.template
        if template is None or self.text is None or not self.request.messages:
            return None
        request = self.request
        return unstable_at(
            template, request.messages or (), request.tools, request.template_options, self.text
        )


def encode(
    request: Request,
    tokenizer: PromptTokenizer | None,
    context: int | None,
    vocabulary: int | None,
    *,
    loaded: Any | None = None,
    recall: Recall | None = None,
) -> Prompt:
    """The prompt of a request. ``loaded`` is mlx-lm's tokenizer where there is one: then that
    renders and, where it is not of the tokenizers library, also encodes. ``recall`` gives the
    tokens of earlier answers that a chat repeats (engine/prompt/memory.py).

    Raises PromptError when the prompt is empty, longer than the model's context, holds unknown
    ids, or needs a tokenizer or chat template that is not there.
    """
    text: str | None = None
    pieces: Sequence[Piece] = ()
    given: Sequence[int]
    if request.tokens is not None:
        given = request.tokens
    elif tokenizer is None and loaded is None:
        raise PromptError("The model has no tokenizer, so its prompts must be token ids.")
    else:
        text = _text(request, tokenizer, loaded)
        if context is not None and tokenizer is not None and len(text) > LONG_TEXT:
            _refuse_at_sight(text, tokenizer, context)
        if not text:
            given = []
        elif tokenizer is None:
            given = _encode_by_loaded(request, text, loaded)
        else:
            pieces = _pieces(request, text, tokenizer, recall)
            given = joined_ids(pieces)
    return Prompt(_checked(given, context, vocabulary), request, text, pieces, tokenizer)


def _pieces(
    request: Request, text: str, tokenizer: PromptTokenizer, recall: Recall | None
) -> list[Piece]:
    if request.text is not None:
        encoding = tokenizer.encode_text(text)
        return [Piece(encoding.ids, len(text), encoding=encoding)]
    splices: Sequence[Splice] = ()
    if recall is not None and tokenizer.template is not None:
        starts = answer_starts(
            tokenizer.template,
            request.messages or (),
            request.tools,
            request.template_options,
            text,
        )
        splices = recall(text, starts) if starts else ()
    return encode_spliced(tokenizer, text, splices)


def _refuse_at_sight(text: str, tokenizer: PromptTokenizer, context: int) -> None:
    """Raise PromptError for a text that is too long whatever its tokens are: to count those of
    10 MB takes many seconds."""
    if tokenizer.longest is not None and len(text) > context * tokenizer.longest:
        raise PromptError(
            f"The prompt has {len(text)} characters, and the model's context holds "
            f"{context} tokens: shorten it."
        )


def _checked(given: Sequence[int], context: int | None, vocabulary: int | None) -> Tokens:
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
    if vocabulary is not None and int(tokens.max()) >= vocabulary:
        raise PromptError(
            f"Token id {int(tokens.max())} is not in the model's vocabulary of {vocabulary}."
        )
    return tokens


def _text(request: Request, tokenizer: PromptTokenizer | None, loaded: Any | None) -> str:
    """The text that a request's prompt is, chats rendered."""
    if request.text is not None:
        check_text(request.text)
        return request.text
    if not request.messages:
        return ""
    options: dict[str, Any] = dict(request.template_options)
    if reserved := RESERVED_OPTIONS & options.keys():
        raise UsageError(f"The template option {min(reserved)} is not yours to set.")
    for name, items in (("message", request.messages), ("tool", request.tools or ())):
        if not all(isinstance(item, Mapping) for item in items):
            raise PromptError(f"A {name} must be an object.")
    template = None if tokenizer is None else tokenizer.template
    ours = isinstance(template, ToolTemplate) and uses_tools(request.messages, request.tools)
    if loaded is not None and not ours:
        if template is None and request.tools:
            _check_tools(loaded)
        text = _render_by_loaded(request, options, loaded)
    elif template is not None:
        text = template.render(request.messages, request.tools, options=options)
    else:
        raise PromptError("The model has no chat template: give its prompt as text.")
    check_text(text)
    return text


def _check_tools(loaded: Any) -> None:
    """Raise PromptError where tools would be left out unseen."""
    source = template_source(loaded)
    if isinstance(source, str) and not mentions_tools(source):
        raise PromptError("The model's chat template has no tools.")


def _render_by_loaded(request: Request, options: Mapping[str, Any], loaded: Any) -> str:
    from jinja2.exceptions import TemplateError

    if not loaded.has_chat_template:
        raise PromptError("The model has no chat template: give its prompt as text.")
    try:
        more = dict(options)
        if request.tools is not None:
            more["tools"] = [dict(tool) for tool in request.tools]
        messages = [dict(message) for message in request.messages or ()]
        text: str = loaded.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **more
        )
    except RecursionError as error:
        raise PromptError("The messages are nested too deeply for the template.") from error
    except (ValueError, TypeError, KeyError, TemplateError) as error:
        raise PromptError(f"The chat template refuses these messages: {error}.") from error
    return text


def _encode_by_loaded(request: Request, text: str, loaded: Any) -> Sequence[int]:
    special = False
    if request.text is not None:
        special = loaded.bos_token is None or not text.startswith(loaded.bos_token)
    ids: Sequence[int] = loaded.encode(text, add_special_tokens=special)
    return ids


def check_text(text: object) -> None:
    """Raise PromptError unless ``text`` is text that can be written down."""
    if not isinstance(text, str):
        raise PromptError("A prompt must be text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError("The prompt holds bytes that are not valid text.") from error
