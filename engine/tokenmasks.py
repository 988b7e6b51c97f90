"""Masks over a model's tokens, so that an answer becomes what a Guide says (llguidance)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from engine.guide import Guide, grammar
from kvdb.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

# Compiled guides that are kept at hand.
MAX_GUIDES = 64


class TokenMasks:
    """The guides of one model. They are compiled on a thread of their own: the tokenizer that they
    need takes a second to build, once, and a large schema some tenths.

    ``backend`` is None for a model without a tokenizer of the tokenizers library; ``vocabulary`` is
    how many logits there are.
    """

    def __init__(self, backend: Tokenizer | None, vocabulary: int, eos: Collection[int]) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._eos = sorted(eos)
        self._known: OrderedDict[Guide, Future[LLMatcher]] = OrderedDict()

    def compile(self, guide: Guide) -> Future[LLMatcher]:
        """The compiled guide, at once where it is known; UsageError where the model cannot follow
        it. Copy it before use."""
        if guide not in self._known:
            self._known[guide] = self._thread.submit(self._compile, guide)
            while len(self._known) > MAX_GUIDES:
                self._known.popitem(last=False)
        self._known.move_to_end(guide)
        return self._known[guide]

    def mask(self, compiled: LLMatcher) -> TokenMask:
        """The masks of one answer."""
        return TokenMask(compiled.deep_copy(), self._vocabulary, self._eos)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "kvdb-guides")

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer

        if self._backend is None or not self._eos:
            lacks = "an end token" if self._backend is not None else "a tokenizer that can be read"
            raise UsageError(f"Answers cannot be guided: the model has not {lacks}.")
        backend = Tokenizer.from_str(self._backend.to_str())
        backend.no_padding()
        backend.no_truncation()
        try:
            return LLTokenizer(backend.to_str(), n_vocab=self._vocabulary, eos_token=self._eos)
        except (ValueError, RuntimeError) as error:
            raise UsageError(
                "Answers cannot be guided: llguidance does not know this model's kind of tokenizer."
            ) from error

    def _compile(self, guide: Guide) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._tokenizer
        tokens: dict[int, Any] = (
            {} if self._backend is None else self._backend.get_added_tokens_decoder()
        )
        special = {token.content: id_ for id_, token in tokens.items() if token.special}
        compiled = LLMatcher(
            tokenizer,
            grammar(guide, special),
            log_level=0,
            limits=LLParserLimits(verbose_errors=False),
        )
        if compiled.is_error():
            what = {"schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
            reason = " ".join(compiled.get_error().split())
            raise UsageError(
                f"The {what.get(guide.kind, 'tools')} cannot be followed: {reason.rstrip('.')}."
            )
        return compiled


class TokenMask:
    """A logits processor: leaves the tokens that may come next, the end token where all may end."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, eos: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos = list(eos)
        self._seen = 0
        self._bits = np.zeros((1, -(-vocabulary // 32)), np.int32)

    def __call__(self, tokens: Sequence[int], logits: mx.array) -> mx.array:
        """``tokens`` are those of the answer so far, logits ``(1, vocabulary)``."""
        if len(tokens) < self._seen:
            self._matcher.reset()
            self._seen = 0
        for token in tokens[self._seen :]:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
        self._seen = len(tokens)
        allowed = mx.array(self._allowed())
        return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))

    def _allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        from llguidance.numpy import fill_next_token_bitmask

        if not self._matcher.is_stopped():
            fill_next_token_bitmask(self._matcher, self._bits)
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split()).rstrip(".")
            raise UsageError(f"The answer cannot be guided any further: {reason}.")
        if self._matcher.is_stopped():
            allowed = np.zeros(self._vocabulary, np.bool_)
            allowed[self._eos] = True
            return allowed
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        return bits[: self._vocabulary].astype(np.bool_)
