"""kvdb explain of a 32 K-token chat, end to end: wall time of the process, no model loaded.

    python -m tests.bench.explain_speed [--model smollm2-135m] [--blocks 200000] [--rounds 7]

The store holds the same chat with another time in its system prompt, other chains of ``--blocks``
blocks, and a history of 2,000 requests. Weights and tokenizer are those of the model; the state is
small, for nothing reads it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvdb
from engine.events import Request
from engine.models import ModelOptions, find_local, quick_identity
from engine.prompt.encode import Prompt, encode
from engine.prompt.tokenizer import PromptTokenizer, load_tokenizer
from kvdb.history import RequestRecord
from kvdb.identity import chain_hashes
from kvdb.layout import LayerSpec, Layout, TensorSpec
from kvdb.store import Store
from kvdb.writer import Payload
from tests.bench.match_speed import fill

LAYOUT = Layout((LayerSpec("KVCache", (TensorSpec("keys", "F32", (1, 1, 4), 2),)),))
TOKENS = 32 * 1024
LINE = 'the quick brown fox writes {"file": "a.txt", "line": 12} and goes on to the next one\n'


def chat(messages: int, tokens: int, tokenizer: PromptTokenizer, when: str) -> dict[str, Any]:
    """An agent's request of about ``tokens`` tokens."""
    per_line = len(tokenizer.encode(LINE, special=False).ids)
    lines = max(1, tokens // messages // per_line)
    roles = ("user", "assistant")
    turns = [
        {"role": roles[n % 2], "content": f"Turn {n}. " + LINE * lines} for n in range(messages - 1)
    ]
    system = {"role": "system", "content": f"You are an agent. It is {when}. " + LINE * lines}
    return {"model": "agent", "messages": [system, *turns]}


def prompt(body: dict[str, Any], tokenizer: PromptTokenizer) -> Prompt:
    return encode(Request(messages=body["messages"]), tokenizer, None, None)


def put(store: Store, namespace: kvdb.Namespace, given: Prompt) -> None:
    size = namespace.block_tokens
    payloads = [
        Payload(n, {"kv:0": np.zeros(16 * min(size, len(given.tokens) - n * size), np.uint8)})
        for n in range(-(-len(given.tokens) // size))
    ]
    ticket = store.put(namespace, given.tokens, payloads)
    tip = chain_hashes(namespace.fingerprint, given.tokens, size)[-1]
    record(store, namespace, given, tip, [ticket])


def record(
    store: Store, namespace: kvdb.Namespace, given: Prompt, tip: bytes | None, tickets: list[Any]
) -> None:
    count = len(given.tokens)
    row = RequestRecord(
        time.time_ns() // 1000,
        namespace.id,
        count,
        0,
        0,
        count,
        10,
        "none",
        prefill_ms=count / 2.0,
        tip_hash=tip,
    )
    store.record(row, tickets, given.segments)


def longer(model: Path, folder: Path) -> Path:
    """The same model with a context that the prompt fits into."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 17}))
    return folder


def cpu_seconds() -> float:
    """Processor time of all processes that were run: what the wall time would be alone."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="Keep the store and bodies here.")
    options = parser.parse_args()
    folder = find_local(options.model)
    if folder is None:
        sys.exit(f"There is no model {options.model} here.")
    with tempfile.TemporaryDirectory() as work:
        folder = longer(folder, Path(work) / "model")
        tokenizer = load_tokenizer(folder)
        path = Path(work) / "store"
        with kvdb.open(path, max_bytes=8 << 30, min_free_bytes=0) as store:
            identity = quick_identity(folder, ModelOptions())
            namespace = store.namespace(identity, LAYOUT, model=str(folder))
            fill(store, namespace, options.blocks)
            short = prompt(chat(3, 100, tokenizer, "nine"), tokenizer)
            for _ in range(2000):
                record(store, namespace, short, None, [])
            for count in (12, 100):
                put(store, namespace, prompt(chat(count, TOKENS, tokenizer, "09:15"), tokenizer))
            store.flush()
        for count in (12, 100):
            body = chat(count, TOKENS, tokenizer, "10:47")
            tokens = len(prompt(body, tokenizer).tokens)
            file = Path(work) / f"{count}.json"
            file.write_text(json.dumps(body))
            command = [sys.executable, "-m", "kvdb", "explain", "--file", str(file), "--json"]
            command += ["--model", str(folder), "--store", str(path)]
            result: dict[str, Any] = {"messages": count, "prompt_tokens": tokens}
            times = []
            used = -cpu_seconds()
            for _ in range(options.rounds):
                start = time.perf_counter()
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                times.append(time.perf_counter() - start)
            answer = json.loads(done.stdout)
            result |= {
                "code": answer["code"],
                "differing_token": answer["differing_token"],
                "seconds": round(statistics.median(times), 3),
                "fastest": round(min(times), 3),
                "slowest": round(max(times), 3),
                "cpu_seconds": round((used + cpu_seconds()) / options.rounds, 3),
            }
            sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
