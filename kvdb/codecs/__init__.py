"""Codecs: how a part's raw bytes are stored. One file each, one registry."""

from __future__ import annotations

from collections.abc import Mapping

from kvdb.codecs import lz4, raw, zstd
from kvdb.codecs.base import Codec
from kvdb.errors import UsageError

CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (raw.Raw(), lz4.Lz4(), zstd.Zstd())}

__all__ = ["CODECS", "Codec", "get_codec"]


def get_codec(name: str) -> Codec:
    """The codec called ``name``. Raises UsageError for an unknown one."""
    try:
        return CODECS[name]
    except KeyError:
        raise UsageError(f"Unknown codec {name!r}; known: {', '.join(CODECS)}.") from None
