"""What an approximate skip costs in quality, and saves in time, against refilling the same holes.

    python -m tests.bench.approximate_kl [--model smollm2-135m] [--block-tokens 32] [--prompts 6]

Each prompt is a conversation about a text of this repository (600 to 2,000 tokens) with a fact put
in its middle. It is stored, then blocks are broken: early, in the middle, just before the question,
spread (5 % in all), or those that hold the fact asked for. The question is answered with these
masked, and with them refilled. Printed as a table of medians, one row for each place.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvdb
from engine import End, Engine, EngineOptions, Request, Stats, Token
from engine.plan import MAX_MISSING
from kvdb.shards import shard_path
from kvdb.store import Store

ROOT = Path(__file__).parent.parent.parent
TEXTS = (
    "README.md",
    "LICENSE",
    "engine/plan.py",
    "docs/schema.md",
    "kvdb/errors.py",
    "CHANGELOG.md",
)
CHARACTERS = (2400, 4200, 6000)
FACT = "Note: the door code of the archive in Lisbon is 4417, and only Ms Duarte knows it."
ABOUT_FACT = "What is the door code of the archive in Lisbon? Answer with the number."
ABOUT_TEXT = "Say in one sentence what this text is about."
ANSWER = 16
PLACES = ("early", "middle", "late", "spread", "fact")


@dataclass(frozen=True)
class Result:
    """One question with the same holes masked and refilled."""

    place: str
    share: float  # of the prompt's tokens that were masked
    kl: float
    same: int  # greedy tokens before the answers part, at most ANSWER
    masked_ms: float
    refill_ms: float
    right: bool  # of a question about the fact: the masked answer has it
    right_exact: bool


def chat(text: str, question: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "You are a careful reader."},
        {"role": "user", "content": f"Read this.\n\n{text}"},
        {"role": "assistant", "content": "I have read it. What do you want to know?"},
        {"role": "user", "content": question},
    ]


def ask(
    engine: Engine, messages: Sequence[dict[str, str]], **options: Any
) -> tuple[list[int], str, Stats]:
    events = list(engine.generate(Request(messages=messages, **{"max_tokens": ANSWER, **options})))
    end = events[-1]
    assert isinstance(end, End)
    tokens = [event for event in events if isinstance(event, Token)]
    return [t.id for t in tokens], "".join(t.text for t in tokens) + end.text, end.stats


def break_blocks(store: Store, depths: Sequence[int]) -> None:
    """Damage the newest state at these places of the only chain there is."""
    for depth in depths:
        rows = store.sql(
            "SELECT s.uuid, p.offset, p.nbytes FROM blocks AS b JOIN parts AS p "
            "ON p.block_id = b.id JOIN shards AS s ON s.id = p.shard_id "
            "WHERE b.depth = ? AND p.part LIKE 'kv:%'",
            (depth,),
        ).rows
        for uuid, offset, size in rows:
            path = shard_path(store.path, uuid)
            path.chmod(0o600)
            with path.open("r+b") as file:
                file.seek(offset + size // 2)
                file.write(b"\xa5" * 8)


def places(blocks: int, fact: Sequence[int]) -> dict[str, list[int]]:
    """Which blocks go, by place: those of a text, between its first block and the question's."""
    last = blocks - 3  # the chat's last messages are behind it
    count = max(1, int(MAX_MISSING * blocks))
    step = max(1, (last - 2) // count)
    return {
        "early": [1],
        "middle": [blocks // 2 - 3],
        "late": [last],
        "spread": [2 + step * i for i in range(count)],
        "fact": list(fact),
    }


def one_prompt(model: str, block: int, text: str, folder: Path) -> list[Result]:
    half = text.find("\n", len(text) // 2)
    text = f"{text[:half]}\n{FACT}\n{text[half:]}"
    results = []
    with (
        kvdb.open(folder) as store,
        Engine(store, model, options=EngineOptions(block)) as engine,
    ):

        def span(worker: Any) -> tuple[int, int]:
            before = len(worker.loaded.tokenizer.encode(text[:half]))
            return before, before + len(worker.loaded.tokenizer.encode(FACT))

        begin, end = engine.call(span)
        _, _, stats = ask(engine, chat(text, ABOUT_TEXT), max_tokens=1)
        offset = 24  # tokens of the template and of the first messages, about
        fact = range((begin + offset) // block, (end + offset) // block + 1)
        for place, depths in places(stats.prompt_tokens // block, fact).items():
            ask(
                engine, chat(text, ABOUT_TEXT), max_tokens=2
            )  # whole again: one token needs no state
            store.flush()
            break_blocks(store, depths)
            question = ABOUT_FACT if place == "fact" else ABOUT_TEXT + " Be brief."
            options = {"store": False, "approximate": True}
            ask(engine, chat(text, question), **options)  # the damage is noticed here
            got, said, masked = ask(engine, chat(text, question), measure_kl=True, **options)
            exact, right, refilled = ask(engine, chat(text, question), store=False)
            if not masked.masked_tokens:
                print(f"{place}: {masked.unmasked}", file=sys.stderr)
                continue
            assert masked.kl is not None
            assert masked.ttft_ms is not None
            assert refilled.ttft_ms is not None
            pairs = zip(got, exact, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(exact))
            results.append(
                Result(
                    place,
                    masked.masked_tokens / masked.prompt_tokens,
                    masked.kl,
                    same,
                    masked.ttft_ms,
                    refilled.ttft_ms,
                    "4417" in said,
                    "4417" in right,
                )
            )
            print(masked.prompt_tokens, results[-1], file=sys.stderr)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--block-tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=6)
    options = parser.parse_args()
    results: list[Result] = []
    for number in range(options.prompts):
        size = CHARACTERS[number % len(CHARACTERS)]
        text = (ROOT / TEXTS[number % len(TEXTS)]).read_text()[:size]
        with tempfile.TemporaryDirectory() as folder:
            results += one_prompt(options.model, options.block_tokens, text, Path(folder) / "store")
    print("| holes | prompts | masked | KL median | KL worst | tokens equal | first token |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for place in PLACES:
        own = [result for result in results if result.place == place]
        if not own:
            continue
        kls = [result.kl for result in own]
        ratio = statistics.median(r.masked_ms / r.refill_ms for r in own)
        print(
            f"| {place} | {len(own)} | {statistics.median(r.share for r in own):.1%} "
            f"| {statistics.median(kls):.3f} | {max(kls):.3f} "
            f"| {statistics.median(r.same for r in own):g} "
            f"| {statistics.median(r.masked_ms for r in own):.0f} / "
            f"{statistics.median(r.refill_ms for r in own):.0f} ms ({ratio:.2f}) |"
        )
    asked = [result for result in results if result.place == "fact"]
    print(
        f"The fact was told by {sum(r.right_exact for r in asked)} of {len(asked)} refilled and "
        f"{sum(r.right for r in asked)} masked answers."
    )


if __name__ == "__main__":
    main()
