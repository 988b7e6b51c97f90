"""What the RAM tier saves: restores from it against restores of verified shards, by codec; and its
hits while chains go round that do not all fit.

    python -m tests.bench.ram_speed [--tokens 4096] [--rounds 7]

State of SmolLM2's shape in float32, of bytes that zstd halves. Page cache warm; interleaved; the
spread is that of the disk restores against themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import kvdb
from engine.blas import preload
from kvdb.ramtier import PartKey, RamTier
from tests.bench.restore_speed import LAYOUT, Clock, fill, restore

CHAINS, BLOCKS, BUDGET = 4, 16, 40


def by_codec(codec: str, tokens: np.ndarray, rounds: int) -> dict[str, Any]:
    nbytes = LAYOUT.by_name["kv:0"].nbytes(len(tokens))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        fill(path, tokens, codec, values=16)
        for _ in range(rounds):
            with kvdb.open(path) as store:
                clock.time("first read", lambda s=store: restore(s, tokens))  # type: ignore[misc]
                for name in ("disk", "disk again"):
                    clock.time(name, lambda s=store: restore(s, tokens))  # type: ignore[misc]
            with kvdb.open(path, ram=2 * nbytes) as store:
                clock.time("let in", lambda s=store: restore(s, tokens))  # type: ignore[misc]
                clock.time("ram", lambda s=store: restore(s, tokens))  # type: ignore[misc]
                assert store.ram.stats().hit_nbytes == nbytes
    disk = ["disk", "disk again"]
    return {
        "ram_over_disk": clock.ratio(disk, "ram"),
        "let_in_over_first_read": clock.ratio(["first read"], "let in"),
        "disk_against_itself": clock.ratio(["disk"], "disk again"),
    }


def going_round(rounds: int = 20) -> dict[str, float]:
    """Chains used in turn, each by one request, beside one that is used every time."""
    tier: RamTier[None] = RamTier(BUDGET)
    hits = {"favourite": 0, "others": 0}
    for number in range(rounds * CHAINS):
        for who, chain in (("favourite", 0), ("others", 1 + number % CHAINS)):
            tier.begin()
            for block in range(BLOCKS):
                key = PartKey(bytes([chain, block]), "kv:0", b"")
                hits[who] += key in tier
                tier.get(key)
                tier.put(key, None, 1)
    every = rounds * CHAINS * BLOCKS
    return {who: round(count / every, 2) for who, count in hits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    preload()
    tokens = np.arange(options.tokens // 256 * 256, dtype=np.uint32)
    result: dict[str, Any] = {"tokens": len(tokens)}
    for codec in ("raw", "zstd"):
        result[codec] = by_codec(codec, tokens, options.rounds)
    result["hits"] = {
        "budget_share": round(BUDGET / ((CHAINS + 1) * BLOCKS), 2),
        **going_round(),
    }
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
