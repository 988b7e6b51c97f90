"""Keys in order, however many: sorted in pieces that go to temporary files, then merged."""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Iterator
from typing import IO, NamedTuple

from kvdb.remotes.naming import BlockKey, parse_block_key

PIECE_KEYS = 100_000


class Sized(NamedTuple):
    """A key of a block, and the bytes that the remote says its object has."""

    key: BlockKey
    nbytes: int


class SortedKeys:
    """Takes keys in any order, gives them namespace by namespace, in each by depth: parents come
    first, and a block's required parts before its others."""

    def __init__(self, piece_keys: int = PIECE_KEYS) -> None:
        self._most = piece_keys
        self._piece: list[str] = []
        self._files: list[IO[str]] = []
        self.count = 0

    def add(self, key: BlockKey, nbytes: int) -> None:
        self._piece.append(f"{key} {max(nbytes, 0)}\n")
        self.count += 1
        if len(self._piece) >= self._most:
            file = tempfile.TemporaryFile("w+", encoding="ascii")  # noqa: SIM115 - closed by close
            self._files.append(file)
            self._piece.sort()
            file.writelines(self._piece)
            file.seek(0)
            self._piece = []

    def __iter__(self) -> Iterator[Sized]:
        """Once."""
        self._piece.sort()
        before = ""
        for line in heapq.merge(self._piece, *self._files):
            text, _, nbytes = line.partition(" ")
            key = parse_block_key(text)
            if key is not None and text != before:
                yield Sized(key, int(nbytes))
            before = text

    def close(self) -> None:
        """Remove the temporary files."""
        for file in self._files:
            file.close()
