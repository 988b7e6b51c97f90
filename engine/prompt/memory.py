"""Token memory: the ids of the model's own answers, for the prompts that go on from them.

A client sends an answer back as text, and its tokens are then seldom those that the model generated
and whose state is stored. So the ids of an answer are remembered under the very text of the prompt
that it answered: where a later prompt begins with this text, and goes on with the text of the ids,
they take the place of a tokenization. That text says whatever else counts: content, calls and
reasoning as the template writes them. Where it drops or rewrites some, nothing is found.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.prompt.tokenizer import PromptTokenizer
from kvdb.answers import MAX_PER_KEY, Answer
from kvdb.identity import Tokens, as_tokens

# Ids at hand; the others are in the store.
MAX_BYTES = 8 << 20
MAX_TOKENS = 1 << 16
# Bytes of an incomplete character, or whole ones that no token has.
REPLACEMENT = "\ufffd"

Fetch = Callable[[Sequence[bytes]], Mapping[bytes, Sequence[Tokens]]]
Recall = Callable[[str, Sequence[int]], "list[Splice]"]


@dataclass(frozen=True, slots=True)
class Splice:
    """Characters ``start`` to ``end`` of a prompt's text are to have the tokens ``ids``."""

    start: int
    end: int
    ids: Tokens


class TokenMemory:
    """The answers of models with one tokenizer. ``fetch`` gives those that the store has by key,
    newest first. To be used on one thread."""

    def __init__(self, tokenizer: PromptTokenizer, fetch: Fetch) -> None:
        self._tokenizer = tokenizer
        self._fetch = fetch
        self._recent: OrderedDict[bytes, list[Tokens]] = OrderedDict()
        self._nbytes = 0
        added = tokenizer.backend.get_added_tokens_decoder().items()
        special = {id_: token.content for id_, token in added if token.special and token.content}
        self._special = frozenset(special)
        self._spelled = re.compile("|".join(map(re.escape, special.values())) or r"(?!)")

    def remember(
        self, prompt: str, ids: Sequence[int], said: str, salt: bytes, *, ended: bool
    ) -> Answer | None:
        """Remember an answer to a prompt; what is returned belongs into the store. None where its
        text cannot be told from its ids.

        ``said`` is the text that the client was given, without that of the last token if this
        ``ended`` the answer. Ids beyond it, as those of a stop text, are not of the answer.
        """
        kept = ids if ended else self._within(ids, said)
        if not 0 < len(kept) <= MAX_TOKENS or not self._is_plain(kept):
            return None
        tokens, (key,) = as_tokens(kept), self._keys(prompt, [len(prompt)], salt)
        known = self._recent.get(key) or self._fetch([key]).get(key, ())
        self._keep(key, [tokens, *known])
        return Answer(key, tokens)

    def recall(self, salt: bytes, text: str, starts: Sequence[int]) -> list[Splice]:
        """The answers that a prompt's ``text`` repeats, at some of the ``starts``, in order."""
        keys = self._keys(text, starts, salt)
        unknown = [key for key in keys if key not in self._recent]
        for key, answers in (self._fetch(unknown) if unknown else {}).items():
            self._keep(key, answers)
        splices: list[Splice] = []
        for key, start in zip(keys, starts, strict=True):
            if splices and start < splices[-1].end:
                continue
            if key not in self._recent:
                continue
            self._recent.move_to_end(key)
            found = [self._fit(ids, text, start) for ids in self._recent[key]]
            if best := max(filter(None, found), key=lambda splice: splice.end, default=None):
                splices.append(best)
        return splices

    def _fit(self, ids: Tokens, text: str, start: int) -> Splice | None:
        """An answer at a place of the text: as it is, or without its end token, where the template
        writes another."""
        for kept in (ids, ids[:-1]) if int(ids[-1]) in self._special else (ids,):
            if not len(kept):
                continue
            own = self._tokenizer.decode(kept.tolist())
            for shown in (own, f" {own}"):  # some decoders strip the space at the start
                if text.startswith(shown, start):
                    return Splice(start, start + len(shown), kept)
        return None

    def _is_plain(self, ids: Sequence[int]) -> bool:
        """Whether the text of some ids is all there is to them: no bytes are left over, and no
        special token is spelled with others, as a template's end of a turn would not be."""
        if REPLACEMENT in self._tokenizer.decode(ids):
            return False
        others = [id_ for id_ in ids if id_ not in self._special]
        return self._spelled.search(self._tokenizer.decode(others)) is None

    def _within(self, ids: Sequence[int], said: str) -> Sequence[int]:
        """As many of the ids as have no text beyond ``said``."""
        # mlx-lm's detokenizers strip a space at the start.
        full = said, f" {said}"

        def beyond(count: int) -> bool:
            own = self._tokenizer.decode(ids[:count]).rstrip(REPLACEMENT)
            return not any(text.startswith(own) for text in full)

        count = len(ids)
        if beyond(count):
            count = bisect_left(range(len(ids)), True, key=beyond) - 1
        while count > 0 and self._tokenizer.decode(ids[:count]).endswith(REPLACEMENT):
            count -= 1  # a character that is not whole
        return ids[: max(count, 0)]

    def _keys(self, text: str, starts: Sequence[int], salt: bytes) -> list[bytes]:
        """One key for each prefix of the text."""
        digest = hashlib.sha256(b"kvdb/answer/1\0" + self._tokenizer.digest)
        digest.update(len(salt).to_bytes(4, "little") + salt)
        at, keys = 0, []
        for start in starts:
            digest.update(text[at:start].encode())
            at = start
            keys.append(digest.digest())
        return keys

    def _keep(self, key: bytes, answers: Sequence[Tokens]) -> None:
        unique = {ids.tobytes(): ids for ids in answers[:MAX_PER_KEY]}
        self._nbytes -= _nbytes(self._recent.pop(key, ()))
        if unique:
            self._recent[key] = list(unique.values())
            self._nbytes += _nbytes(self._recent[key])
        while self._nbytes > MAX_BYTES:
            self._nbytes -= _nbytes(self._recent.popitem(last=False)[1])


def _nbytes(answers: Sequence[Tokens]) -> int:
    return sum(ids.nbytes + 128 for ids in answers)
