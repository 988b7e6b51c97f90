"""Memory: how much this process holds, and MLX arrays that are allocated but not written.

A restore overwrites such arrays anyway. MLX has no call for them: its ``empty`` is ``zeros``, whose
page faults cost more than reading the same bytes. But ``mx.load`` allocates plainly and lets a file
object fill the memory; one that fills nothing gives what is needed.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine import mlxlm
from engine.guard import Gauges
from kvdb.layout import TensorSpec

STATM = Path("/proc/self/statm")


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


def held_bytes() -> int:
    """Bytes of memory that this process holds: resident ones, and a GPU's of its own. Where the
    system does not say, those that MLX knows of."""
    of_mlx = mx.get_active_memory() + mx.get_cache_memory()
    try:
        pages = int(STATM.read_text().split()[1])
    except OSError:
        return of_mlx
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    return resident if mlxlm.host_memory() else resident + of_mlx


def release_memory() -> None:
    """Give back what is freed but cached, by MLX and by the C library."""
    mlxlm.release_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def gauges() -> Gauges:
    """This process's memory, for the guard."""
    return Gauges(
        held=held_bytes,
        active=mx.get_active_memory,
        peak=mx.get_peak_memory,
        reset_peak=mx.reset_peak_memory,
        release=release_memory,
    )


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
