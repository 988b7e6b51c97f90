"""match of a 128 K-token prompt in a store of 1 M blocks, against hashing its tokens alone.

    python -m tests.bench.match_speed [--blocks 1000000] [--rounds 15]

Both are timed in turn in one run; the spread is that of the hashing against itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import kvdb
from kvdb import index
from kvdb.identity import chain_hashes, encode_extra
from kvdb.layout import LayerSpec, Layout, TensorSpec
from kvdb.store import Store

PROMPT_TOKENS = 128 * 1024
BLOCK_TOKENS = 256
CHAIN_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
BLOCKS_PER_SHARD = 64


def fill(store: Store, namespace: kvdb.Namespace, blocks: int) -> np.ndarray:
    """Index rows of ``blocks`` blocks in chains of a prompt's length; payload files are not
    needed to match. Returns the tokens of the chain in the middle."""
    random = np.random.default_rng(1)
    extra = encode_extra(())
    chosen = None
    for chain in range(-(-blocks // CHAIN_BLOCKS)):
        tokens = random.integers(0, 100_000, PROMPT_TOKENS, dtype=np.uint32)
        if chain == blocks // CHAIN_BLOCKS // 2:
            chosen = tokens
        hashes = chain_hashes(namespace.fingerprint, tokens, BLOCK_TOKENS)
        with store.database.write() as connection:
            parent = shard = None
            for depth, hash_ in enumerate(hashes):
                if depth % BLOCKS_PER_SHARD == 0:
                    uuid = store.environment.new_uuid()
                    (shard,) = connection.execute(
                        index.INSERT_SHARD, (uuid, namespace.id, None, 1 << 20, 0)
                    ).fetchone()
                own = tokens[depth * BLOCK_TOKENS : (depth + 1) * BLOCK_TOKENS].tobytes()
                parent = index.insert_block(
                    connection,
                    hash_=hash_,
                    parent_id=parent,
                    namespace_id=namespace.id,
                    depth=depth,
                    token_count=BLOCK_TOKENS,
                    origin="prefill",
                    exact=False,
                    build_id=None,
                    now=0,
                    tick=chain,
                    tokens=own,
                    extra=extra,
                )
                index.insert_parts(
                    connection,
                    [(parent, "kv:0", shard, depth * 4096, 4096, 4096, "raw", bytes(16))],
                )
        if chain % 100 == 99:
            print(f"{(chain + 1) * CHAIN_BLOCKS} blocks", file=sys.stderr)
    assert chosen is not None
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    tensor = TensorSpec("keys", "F32", (1, 1, 4), 2)
    layout = Layout((LayerSpec("KVCache", (tensor,)),))
    with tempfile.TemporaryDirectory() as folder, kvdb.open(Path(folder) / "store") as store:
        identity = kvdb.ModelIdentity("bench", "bench")
        namespace = store.namespace(identity, layout, block_tokens=BLOCK_TOKENS)
        tokens = fill(store, namespace, options.blocks)
        times: dict[str, list[float]] = {"hash": [], "hash again": [], "match": [], "miss": []}
        other = tokens.copy()
        other[0] += 1

        def timed(name: str, call: object) -> object:
            start = time.perf_counter()
            result = call()  # type: ignore[operator]
            times[name].append((time.perf_counter() - start) * 1000)
            return result

        for _ in range(options.rounds):
            timed("hash", lambda: chain_hashes(namespace.fingerprint, tokens, BLOCK_TOKENS))
            match = timed("match", lambda: store.match(namespace, tokens))
            timed("hash again", lambda: chain_hashes(namespace.fingerprint, tokens, BLOCK_TOKENS))
            timed("miss", lambda: store.match(namespace, other))
            assert not match.holes  # type: ignore[attr-defined]
        medians = {name: statistics.median(values) for name, values in times.items()}
        json.dump(
            {
                "blocks": options.blocks,
                "prompt_tokens": PROMPT_TOKENS,
                "median_ms": {name: round(value, 3) for name, value in medians.items()},
                "match_over_hash": round(medians["match"] / medians["hash"], 2),
                "hash_against_itself": round(medians["hash again"] / medians["hash"], 2),
            },
            sys.stdout,
            indent=2,
        )
        print()


if __name__ == "__main__":
    main()
