"""What a codec is."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Codec(Protocol):
    """Encodes a part's raw bytes. ``decode`` gives exactly ``raw_nbytes`` bytes or raises
    IntegrityError; stored bytes may come from a damaged or hostile file. A ``lossless`` codec gives
    back the bytes that were put."""

    name: str
    lossless: bool

    def encode(self, raw: Bytes) -> Bytes: ...

    def decode(self, stored: Bytes, raw_nbytes: int) -> Bytes: ...
