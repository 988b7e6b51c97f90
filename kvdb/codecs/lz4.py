"""lz4 block format. On real bf16 KV it saves 1 %; it helps on zeros and padded state."""

from __future__ import annotations

import lz4.block
import numpy as np

from kvdb.codecs.base import Bytes
from kvdb.errors import IntegrityError


class Lz4:
    name = "lz4"
    lossless = True

    def encode(self, raw: Bytes) -> Bytes:
        return np.frombuffer(lz4.block.compress(raw.data, store_size=False), dtype=np.uint8)

    def decode(self, stored: Bytes, raw_nbytes: int) -> Bytes:
        # The size comes from the index, never from the stored bytes: a bomb has no say in it.
        try:
            raw = lz4.block.decompress(stored.data, uncompressed_size=raw_nbytes)
        except lz4.block.LZ4BlockError as error:
            raise IntegrityError(f"An lz4 part does not decode: {error}.") from error
        if len(raw) != raw_nbytes:
            raise IntegrityError(f"An lz4 part has {len(raw)} bytes instead of {raw_nbytes}.")
        return np.frombuffer(raw, dtype=np.uint8)
