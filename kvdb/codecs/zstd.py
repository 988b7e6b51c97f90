"""zstd level 1. Higher levels are slower and not smaller on KV state."""

from __future__ import annotations

import numpy as np
import zstandard

from kvdb.codecs.base import Bytes
from kvdb.errors import IntegrityError

MAX_WINDOW_BYTES = 1 << 27


class Zstd:
    name = "zstd"
    lossless = True

    def encode(self, raw: Bytes) -> Bytes:
        frame = zstandard.ZstdCompressor(level=1).compress(raw.data)
        return np.frombuffer(frame, dtype=np.uint8)

    def decode(self, stored: Bytes, raw_nbytes: int) -> Bytes:
        # The declared size is compared first: decompress() would allocate whatever it declares.
        try:
            declared = zstandard.frame_content_size(stored.data)
            if declared != raw_nbytes:
                raise IntegrityError(f"A zstd part declares {declared} bytes, not {raw_nbytes}.")
            decoder = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
            raw = decoder.decompress(stored.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise IntegrityError(f"A zstd part does not decode: {error}.") from error
        if len(raw) != raw_nbytes:
            raise IntegrityError(f"A zstd part has {len(raw)} bytes instead of {raw_nbytes}.")
        return np.frombuffer(raw, dtype=np.uint8)
