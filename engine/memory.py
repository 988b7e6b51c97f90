"""MLX arrays whose memory is allocated but not written: restores overwrite it anyway.

MLX has no such call: its ``empty`` is ``zeros``, whose page faults cost more than reading the same
bytes. But ``mx.load`` allocates plainly and lets a file object fill the memory; one that fills
nothing gives what is needed.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvdb.layout import TensorSpec


class _NothingToRead(io.RawIOBase):
    """A safetensors file of which only the header is ever delivered."""

    def __init__(self, header: bytes, size: int) -> None:
        self._header = header
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = len(buffer)
        known = self._header[self._position : self._position + count]
        buffer[: len(known)] = known
        self._position += count
        return count


def unwritten(specs: Sequence[TensorSpec], tokens: int) -> list[mx.array]:
    """One evaluated array per spec, of shape ``full_shape(tokens)``, holding whatever lay there."""
    header: dict[str, Any] = {}
    position = 0
    for number, spec in enumerate(specs):
        end = position + spec.nbytes(tokens)
        header[str(number)] = {
            "dtype": spec.dtype,
            "shape": list(spec.full_shape(tokens)),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    head = struct.pack("<Q", len(text)) + text
    source: Any = _NothingToRead(head, len(head) + position)
    loaded: Any = mx.load(source, format="safetensors")
    arrays = [loaded[str(number)] for number in range(len(specs))]
    mx.eval(arrays)
    return arrays
