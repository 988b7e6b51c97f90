"""Puts, reads and evicts until it is killed; prints a line for every acknowledged block."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import kvdb
from tests.support import BLOCK, check_prefix, open_namespace, payloads, random_tokens


def main() -> None:
    path, seed = Path(sys.argv[1]), int(sys.argv[2])
    random = np.random.default_rng(seed)
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        print("ready", flush=True)
        for round_ in range(10_000):
            prompt = int(random.integers(0, 1 << 30))
            tokens = random_tokens(prompt, 6 * BLOCK)
            for blocks in range(1, 7):
                prefix = tokens[: blocks * BLOCK]
                made = payloads(namespace, prefix, first=blocks - 1)
                ticket = store.put(namespace, prefix, made)
                if ticket.wait(30).stored:
                    print(f"ack {prompt} {blocks}", flush=True)
            with store.lease(namespace, tokens):
                check_prefix(store, namespace, tokens)
            if round_ % 7 == 6:
                print("evicting", flush=True)
                store.evict(to_bytes=store.limit.used(store.database.reader()) - 20_000)
                print("evicted", flush=True)


if __name__ == "__main__":
    main()
