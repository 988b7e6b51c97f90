"""Single tokens as clients are told of them: their text, and the bytes it is a part of."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.prompt.tokenizer import PromptTokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Texts of token ids; empty for a model whose tokenizer cannot be asked."""

    def __init__(self, tokenizer: PromptTokenizer | None) -> None:
        self._tokenizer = tokenizer
        decoder = None if tokenizer is None else tokenizer.backend.decoder
        self._byte_level = type(decoder).__name__ == "ByteLevel"
        self._known: dict[int, tuple[str, bytes]] = {}

    def __getitem__(self, token: int) -> tuple[str, bytes]:
        """``(text, bytes)``: a token may be a part of a character, and its text then ``�``."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def _look_up(self, token: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            return "", b""
        name = self._tokenizer.backend.id_to_token(token) or ""
        if self._byte_level and all(char in _byte_of() for char in name):
            raw = bytes(_byte_of()[char] for char in name)
            return raw.decode("utf-8", "replace"), raw
        if byte := BYTE_TOKEN.fullmatch(name):
            raw = bytes((int(byte[1], 16),))
            return raw.decode("utf-8", "replace"), raw
        text = self._tokenizer.decode([token])
        return text, text.encode("utf-8", "replace")


@cache
def _byte_of() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: its own where that is one, else
    one from U+0100 on, in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
