"""The tokens of a prompt's text, some of them given: remembered answers in their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.prompt.memory import Splice
from engine.prompt.tokenizer import PromptTokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of the characters up to ``end``. Of a tokenization, ``offsets`` are those of its
    characters from ``start`` on, the first ``skip`` tokens left out; of an answer, there are
    none."""

    ids: Sequence[int]
    end: int
    start: int = 0
    encoding: Encoding | None = None
    skip: int = 0

    def ends(self) -> npt.NDArray[np.int64]:
        """The character ends of its tokens. No part of a prompt ends inside of an answer, so those
        of its tokens all end where it does."""
        if self.encoding is None:
            return np.full(len(self.ids), self.end, dtype=np.int64)
        offsets = self.encoding.offsets[self.skip :]
        return np.array([end for _, end in offsets], dtype=np.int64) + self.start


def encode_spliced(tokenizer: PromptTokenizer, text: str, splices: Sequence[Splice]) -> list[Piece]:
    """The tokens of ``text`` with those of ``splices``, in order, in their places. What these are
    decoded to is what the tokens of a plain tokenization are; else that is returned."""
    pieces: list[Piece] = []
    at = 0
    for splice in splices:
        before = [*pieces, *_between(tokenizer, text, at, splice.start, pieces)]
        if before and _says(tokenizer, before[-1].ids[-1], text, splice):
            pieces = [*before, Piece(splice.ids.tolist(), splice.end)]
            at = splice.end
    if not pieces:
        return _between(tokenizer, text, 0, len(text), [])
    pieces += _between(tokenizer, text, at, len(text), pieces)
    said = tokenizer.decode(joined_ids(pieces))
    if said == text:
        return pieces
    # Some tokenizers normalise text: then neither way gives it back.
    plain = _between(tokenizer, text, 0, len(text), [])
    return pieces if said == tokenizer.decode(joined_ids(plain)) else plain


def joined_ids(pieces: Sequence[Piece]) -> list[int]:
    return [id_ for piece in pieces for id_ in piece.ids]


def _between(
    tokenizer: PromptTokenizer, text: str, start: int, end: int, before: Sequence[Piece]
) -> list[Piece]:
    """A piece of text between answers, or none if it has no tokens: as it is tokenized behind the
    token before it, where that can be told from its text."""
    if start == end:
        return []
    if before:
        last = before[-1].ids[-1]
        shown = tokenizer.decode([last])
        if text.endswith(shown, 0, start):
            encoding = tokenizer.encode(text[start - len(shown) : end], special=False)
            if encoding.ids[:1] == [last]:
                piece = Piece(encoding.ids[1:], end, start - len(shown), encoding, skip=1)
                return [piece] if piece.ids else []
    encoding = tokenizer.encode(text[start:end], special=False)
    return [Piece(encoding.ids, end, start, encoding)] if encoding.ids else []


def _says(tokenizer: PromptTokenizer, last: int, text: str, splice: Splice) -> bool:
    """Behind the token ``last``, do the ids say just what stands in their place?"""
    said = tokenizer.decode([last, *splice.ids.tolist()])
    return said == tokenizer.decode([last]) + text[splice.start : splice.end]
