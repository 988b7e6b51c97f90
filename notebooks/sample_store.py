"""A store with weeks of history, made in seconds: what the notebooks and tests look at.

Four tenants ask two models. Every request really is looked up and stored through kvdb's public
API; only the clock, the tokens and the model's speed are made up, all from one seed:

- ``support`` has one long system prompt and many short chats;
- ``coding`` lets conversations grow, and in the last fifth of the days puts the time near the front
  of its prompt, so that nothing matches any more;
- ``reading`` sends long documents, and comes back to some of them, at once or days later;
- ``nightly`` asks the same questions every night.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvdb import (
    LayerSpec,
    Layout,
    ModelIdentity,
    Namespace,
    Options,
    Payload,
    RequestRecord,
    Store,
    TensorSpec,
)
from kvdb.clock import Environment
from kvdb.identity import chain_hashes
from kvdb.opening import open_store
from kvdb.segments import Segment, content_digest

Tokens = npt.NDArray[np.uint32]

DAY = 24 * 3600.0
END = 1_790_035_200.0  # 22 September 2026, 0:00 UTC: a fixed end makes a fixed store
BLOCK_TOKENS = 64
MAX_BYTES = 24 << 20
LAYOUT = Layout(
    (
        LayerSpec(
            "KVCache",
            tuple(TensorSpec(name, "F16", (1, 2, 32), 2) for name in ("keys", "values")),
        ),
    ),
    TensorSpec("logits", "F16", (1, 64), None),
)


@dataclass(frozen=True, slots=True)
class Model:
    """A made-up model: prompt tokens a second it computes, and can restore."""

    name: str
    prefill_speed: float
    restore_speed: float = 40_000


CHAT = Model("chat-8b", 600)
CODER = Model("coder-30b", 150)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when (Unix seconds), who, which model, with which prompt and answer. The first
    of several parts of a prompt is the system prompt, the others are messages."""

    at: float
    tenant: str
    client: str
    model: Model
    parts: tuple[Tokens, ...]
    answer: Tokens

    @property
    def prompt(self) -> Tokens:
        return np.concatenate(self.parts)

    @property
    def segments(self) -> tuple[Segment, ...]:
        segments = []
        for number, part in enumerate(self.parts):
            role = "system" if number == 0 and len(self.parts) > 1 else "user"
            kind = "system" if role == "system" else "message"
            end = sum(map(len, self.parts[: number + 1]))
            digest = content_digest(part.tobytes().hex())
            segments.append(Segment(kind, end, role, number, digest=digest))
        return tuple(segments)


class Clock:
    """Wall time that stands where it was put."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def now_us(self) -> int:
        return int(self.seconds * 1e6)


def make_store(
    path: Path, *, days: int = 28, end: float = END, seed: int = 1, max_bytes: int = MAX_BYTES
) -> Path:
    """Make a store of ``days`` days up to ``end`` at ``path``, which must not exist. About 60
    requests a day; 28 days take about 20 seconds."""
    clock = Clock(end - days * DAY)
    options = Options(max_bytes=max_bytes, min_free_bytes=0, program="sample")
    environment = Environment(now_us=clock.now_us)
    with open_store(path, options, environment=environment) as store:
        namespaces = {
            model: store.namespace(
                ModelIdentity(model.name, "sample"),
                LAYOUT,
                model=model.name,
                block_tokens=BLOCK_TOKENS,
            )
            for model in (CHAT, CODER)
        }
        random = np.random.default_rng(seed)
        for asked in sorted(workload(days, end, random), key=lambda asked: asked.at):
            clock.seconds = asked.at
            serve(store, namespaces[asked.model], asked, random)
    return path


def workload(days: int, end: float, random: np.random.Generator) -> Iterator[Asked]:
    """What is asked in ``days`` days, in no order."""

    def text(tokens: float) -> Tokens:
        return random.integers(0, 32_000, max(1, int(tokens)), dtype=np.uint32)

    def ask(at: float, tenant: str, model: Model, *parts: Tokens, answer: float = 40) -> Asked:
        return Asked(at, tenant, f"{tenant}-{int(at) % 3 + 1}", model, parts, text(answer))

    support_prompt, coding_prompt = text(900), text(1_500)
    opening, rules = coding_prompt[:8], coding_prompt[8:]
    questions = [text(120) for _ in range(6)]
    for day in range(days):
        midnight = end - (days - day) * DAY
        weekend = datetime.fromtimestamp(midnight, UTC).weekday() >= 5

        def hour(first: float, last: float, midnight: float = midnight) -> float:
            return midnight + 3600 * random.uniform(first, last)

        for _ in range(6 if weekend else 22):
            question = text(random.uniform(30, 200))
            yield ask(hour(7, 21), "support", CHAT, support_prompt, question)
        for _ in range(0 if weekend else 3):
            at = hour(9, 17)
            clock_first = day >= days * 0.8
            system = coding_prompt
            conversation: list[Tokens] = []
            for _ in range(int(random.integers(4, 9))):
                if clock_first:
                    system = np.concatenate([opening, text(6), rules])
                conversation.append(text(random.uniform(80, 300)))
                asked = ask(at, "coding", CODER, system, *conversation, answer=120)
                yield asked
                conversation.append(asked.answer)
                at += random.exponential(1800)
                if at > end:
                    break
        for _ in range(1 if weekend else 5):
            at, document = hour(8, 23), text(random.uniform(1_000, 3_000))
            for _ in range(int(random.integers(1, 5))):
                yield ask(at, "reading", CHAT, np.concatenate([document, text(40)]), answer=100)
                at += random.exponential(DAY)
                if at > end:
                    break
        for number, question in enumerate(questions):
            yield ask(midnight + 2 * 3600 + 20 * number, "nightly", CHAT, support_prompt, question)


def serve(store: Store, namespace: Namespace, asked: Asked, random: np.random.Generator) -> None:
    """What an engine does: look up, restore what is there, compute the rest, store all of it."""
    prompt, model = asked.prompt, asked.model
    match = store.match(namespace, prompt)
    restored = match.live_prefix_tokens
    if restored == match.token_count and match.shared is not None:
        restored += match.shared.token_count
    if match.logits is None:
        restored = min(restored, len(prompt) - 1)  # the last token's logits must be computed
    computed = len(prompt) - restored
    jitter = random.uniform(0.9, 1.15)
    lookup_ms = 0.4 + len(prompt) / 20_000
    restore_ms = 1e3 * restored / model.restore_speed * jitter
    prefill_ms = 1e3 * computed / model.prefill_speed * jitter
    first_token_ms = lookup_ms + restore_ms + prefill_ms + 3.0
    everything = np.concatenate([prompt, asked.answer])
    if computed:
        put(store, namespace, prompt, restored, random)
    put(store, namespace, everything, len(prompt), random, origin="decode")
    store.record(
        RequestRecord(
            started_at=int(asked.at * 1e6),
            namespace_id=namespace.id,
            prompt_tokens=len(prompt),
            restored_tokens=restored,
            refilled_tokens=0,
            computed_tokens=computed,
            generated_tokens=len(asked.answer),
            skip="full" if computed == 0 else "partial" if restored else "none",
            matched_tokens=restored,
            tenant=asked.tenant,
            client=asked.client,
            miss_reason=match.miss_reason,
            deepest_block_id=match.tip_id,
            tip_hash=chain_hashes(namespace.fingerprint, everything, namespace.block_tokens)[-1],
            bytes_read=restored * LAYOUT.parts[0].nbytes(1),
            load_ms=0.0,
            warmup_ms=0.0,
            lookup_ms=lookup_ms,
            restore_ms=restore_ms,
            prefill_ms=prefill_ms,
            first_sample_ms=3.0,
            behind_ms=0.0,
            first_token_ms=first_token_ms,
            total_ms=first_token_ms + 25 * len(asked.answer),
            touched=tuple(block.id for block in match.blocks),
            segments=asked.segments,
        )
    )
    store.flush()


def put(
    store: Store,
    namespace: Namespace,
    tokens: Tokens,
    start: int,
    random: np.random.Generator,
    origin: str = "prefill",
) -> None:
    """Store the blocks from the one that token ``start`` lies in; the last one keeps logits of a
    prompt's end."""
    payloads = []
    for first in range(start - start % BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
        count = min(BLOCK_TOKENS, len(tokens) - first)
        parts = {
            part.name: random.integers(0, 256, part.nbytes(count), dtype=np.uint8)
            for part in LAYOUT.parts
            if part.required or (origin == "prefill" and first + count == len(tokens))
        }
        payloads.append(Payload(first // BLOCK_TOKENS, parts))
    store.put(namespace, tokens, payloads, origin=origin)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Make a sample store.")
    arguments.add_argument("path", type=Path)
    arguments.add_argument("--days", type=int, default=28)
    chosen = arguments.parse_args()
    make_store(chosen.path, days=chosen.days)
