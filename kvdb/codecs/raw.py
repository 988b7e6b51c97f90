"""raw: the bytes as they are. The default: restores go straight into final memory."""

from __future__ import annotations

from kvdb.codecs.base import Bytes
from kvdb.errors import IntegrityError


class Raw:
    name = "raw"
    lossless = True

    def encode(self, raw: Bytes) -> Bytes:
        return raw

    def decode(self, stored: Bytes, raw_nbytes: int) -> Bytes:
        if stored.nbytes != raw_nbytes:
            raise IntegrityError(f"A raw part has {stored.nbytes} bytes instead of {raw_nbytes}.")
        return stored
