"""Restoring from a remote on a GPU of its own memory: one store computes and shares through a
folder, another restores from there, then from its own shards.

    python -m tests.bench.h200_remote [--tokens 16384] [--folder DIR] [--tiny]

Prints one JSON object. The model is that of tests.bench.h200.
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
from engine import End, Engine, EngineOptions, Request, Token, blas
from kvdb.remotes.configs import new_spec
from kvdb.remotes.tier import attach
from kvdb.store import Store
from tests.bench.h200 import LLAMA_8B, TINY
from tests.bench.random_model import use_random_weights


def ask(engine: Engine, prompt: list[int], **more: Any) -> dict[str, Any]:
    ids: list[int] = []
    for event in engine.generate(Request(tokens=prompt, ignore_eos=True, max_tokens=8, **more)):
        if isinstance(event, Token):
            ids.append(event.id)
        if isinstance(event, End):
            stats = event.stats
    return {
        "ids": ids,
        "skip": stats.skip,
        "restored": stats.restored_tokens,
        "from_remote": stats.remote_tokens,
        "remote_bytes": stats.bytes_remote,
        "prefill_ms": round(stats.prefill_ms or 0, 1),
        "restore_ms": round(stats.restore_ms or 0, 1),
        "lookup_ms": round(stats.lookup_ms or 0, 1),
        "first_token_ms": round(stats.first_token_ms or 0, 1),
        "total_ms": round(stats.total_ms or 0, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--folder", type=Path, help="where stores are made and removed")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    blas.preload()
    from engine import mlxlm

    if options.tiny and mlxlm.host_memory():  # the code of a device that is not here
        mlxlm.host_memory = lambda: False
        mlxlm.device_bytes = lambda: 1 << 30
    shape = TINY if options.tiny else LLAMA_8B
    tokens = min(options.tokens, 512) if options.tiny else options.tokens
    use_random_weights(shape, "bfloat16")
    prompt = np.random.default_rng(0).integers(0, shape["vocab_size"], tokens).tolist()
    result: dict[str, Any] = {"tokens": tokens}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        (folder / "shared").mkdir()
        spec = new_spec("team", (folder / "shared").as_uri(), budget_ms=10_000)

        def opened(which: str) -> Store:
            store = kvdb.open(
                folder / which, max_bytes=20 << 30, min_free_bytes=0, queue_bytes=20 << 30, ram=0
            )
            store.remotes = attach(store, [spec])
            return store

        settings = EngineOptions(block_tokens=256)
        with opened("a") as a, Engine(a, "random", options=settings) as engine:
            ask(engine, prompt[:300], read=False, store=False)
            result["cold"] = ask(engine, prompt, read=False)
            a.flush(300)
            assert a.remotes is not None
            namespace = a.namespaces()[0]
            a.remotes.stored(a.match(namespace, prompt).hashes)
            result["shared"] = a.remotes.flush(300)
        with opened("b") as b, Engine(b, "random", options=settings) as engine:
            ask(engine, prompt[:300], read=False, store=False)
            result["from the remote"] = ask(engine, prompt)
            result["from the remote, more"] = ask(engine, [*prompt[: tokens // 2], 3])
            result["from its own shards"] = ask(engine, prompt)
            b.flush(60)
            result["rows"] = b.sql(
                "SELECT remote, remote_decision, remote_tokens, load_estimate_ms, "
                "compute_estimate_ms FROM requests"
            ).rows
    result["equal"] = result["cold"]["ids"] == result["from the remote"]["ids"]
    json.dump(result, sys.stdout, indent=1, default=str)
    print()


if __name__ == "__main__":
    main()
