"""Approximate skips: what is missing is left out, counted, measured, and never stored."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from chat_model import write_chat_model
from tiny_model import Run, difference, prompt_tokens, run
from zoo import write_species

import kvdb
from engine import End, Engine, EngineOptions, ModelOptions, Request
from kvdb.errors import UsageError
from kvdb.segments import Segment, last_question
from kvdb.shards import shard_path
from kvdb.store import Store

BLOCK = 16
STORY = [
    {"role": "system", "content": "You answer in one word. " * 12},
    {"role": "user", "content": "Here is what happened on the way. " * 20},
    {"role": "assistant", "content": "I have read it. " * 6},
]
HOLE = 30  # in the first user's message


def asking(question: str) -> list[dict[str, str]]:
    return [*STORY, {"role": "user", "content": question}]


QUESTION = asking("What colour was the fox that crossed the road?")


class Chat:
    """A stored conversation whose blocks can be broken."""

    def __init__(self, store: Store, engine: Engine) -> None:
        self.store, self.engine = store, engine

    def ask(self, messages: list[dict[str, str]] = QUESTION, **options: Any) -> Run:
        return run(self.engine, None, messages=messages, **options)

    def hole(self, depth: int) -> None:
        """Break the payload of a block, and have it noticed."""
        ((uuid, offset, size),) = self.store.sql(
            "SELECT s.uuid, p.offset, p.nbytes FROM blocks AS b JOIN parts AS p "
            "ON p.block_id = b.id JOIN shards AS s ON s.id = p.shard_id "
            "WHERE b.depth = ? AND p.part LIKE 'kv:%' ORDER BY b.id LIMIT 1",
            (depth,),
        ).rows
        path = shard_path(self.store.path, uuid)
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(offset + size // 2)
            file.write(b"\xa5" * 8)

    def rows(self, columns: str) -> list[tuple[Any, ...]]:
        return list(self.store.sql(f"SELECT {columns} FROM requests ORDER BY id").rows)  # noqa: S608


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("approximate") / "chat")


@pytest.fixture
def chat(model: Path, tmp_path: Path) -> Iterator[Chat]:
    yield from opened(model, tmp_path)


def opened(model: Path, folder: Path, **options: Any) -> Iterator[Chat]:
    with (
        kvdb.open(folder / "store", min_free_bytes=0) as store,
        Engine(
            store,
            str(model),
            model_options=ModelOptions(**options),
            options=EngineOptions(BLOCK),
        ) as engine,
    ):
        yield Chat(store, engine)


def test_a_hole_is_masked_and_nothing_behind_it_is_stored(chat: Chat) -> None:
    cold = chat.ask(read=False, store=False)
    chat.ask(max_tokens=1)
    chat.hole(HOLE)
    other = asking("Who saw it?")
    exact = chat.ask(other, read=False, store=False)
    blocks = chat.rows("(SELECT count(*) FROM blocks)")[-1]
    masked = chat.ask(other, approximate=True)
    stats = masked.stats
    assert (stats.skip, stats.masked_tokens, stats.refilled_tokens) == ("approximate", BLOCK, 0)
    assert (
        stats.restored_tokens + stats.masked_tokens + stats.computed_tokens == stats.prompt_tokens
    )
    assert stats.forwarded_prompt_tokens == stats.computed_tokens
    assert stats.alone
    # It differs from the exact answer by what was left out, and by no more than that.
    assert 1e-4 < difference(exact.logits[:1], masked.logits[:1]) < 0.5
    assert chat.rows("(SELECT count(*) FROM blocks)")[-1] == blocks
    assert chat.rows("skip, masked_tokens, unstored")[-1] == ("approximate", BLOCK, "approximate")
    # The same without leave to approximate: refilled, equal, and stored.
    again = chat.ask()
    assert again.stats.refilled_tokens == BLOCK
    assert difference(cold.logits, again.logits) <= 1e-4


def test_masking_is_leaving_the_keys_out(chat: Chat) -> None:
    """Against a cache that has no such rows at all, but counts positions as if it had."""
    chat.ask(max_tokens=1)
    chat.hole(HOLE)
    other = asking("Who saw it?")
    got = chat.ask(other, approximate=True, max_tokens=1)
    assert got.stats.masked_tokens == BLOCK
    for depth, same in ((HOLE, True), (HOLE + 1, False)):
        want = chat.engine.call(partial(without_block, messages=other, depth=depth))
        assert (difference(got.logits, want) <= 1e-4) == same


def without_block(worker: Any, messages: list[dict[str, str]], depth: int) -> Any:
    """Logits ``(1, vocabulary)`` of a chat whose question is computed without one block."""
    from mlx_lm.models.cache import ConcatenateKVCache

    class Compact(ConcatenateKVCache):  # type: ignore[misc]
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            self.keys = mx.concatenate([self.keys, keys], axis=2)
            self.values = mx.concatenate([self.values, values], axis=2)
            self.offset += keys.shape[2]
            return self.keys, self.values

        def make_mask(self, count: int, **_: Any) -> str | None:
            return "causal" if count > 1 else None

    tokens = worker.loaded.prompts.encode(
        worker.loaded.prompts.template.render(messages, None, options={}), special=False
    ).ids
    stored = worker.loaded.prompts.encode(
        worker.loaded.prompts.template.render(QUESTION, None, options={}), special=False
    ).ids
    start = next(
        i for i, pair in enumerate(zip(tokens, stored, strict=False)) if len(set(pair)) > 1
    )
    caches = worker.new_caches()
    worker.model.model(mx.array(tokens[:start])[None], cache=caches)
    gone = range(depth * BLOCK, depth * BLOCK + BLOCK)
    rows = mx.array([i for i in range(start) if i not in gone])
    compact = []
    for cache in caches:
        other = Compact()
        other.keys, other.values = cache.keys[:, :, rows], cache.values[:, :, rows]
        other.offset = start
        compact.append(other)
    logits = worker.model.model(mx.array(tokens[start:])[None], cache=compact)[:, -1]
    return np.array(logits.astype(mx.float32))


@pytest.mark.parametrize("where", ["first block", "question", "too much"])
def test_what_may_not_be_masked_is_refilled(chat: Chat, where: str) -> None:
    cold = chat.ask(read=False, store=False)
    chat.ask(max_tokens=1)
    last = cold.stats.prompt_tokens // BLOCK - 1
    gone = {"first block": [0], "question": [last - 1], "too much": [20, 25, 30, 35]}[where]
    for depth in gone:
        chat.hole(depth)
    again = chat.ask(approximate=True)
    assert again.stats.masked_tokens == 0
    assert again.stats.refilled_tokens == BLOCK * len(gone)
    assert "first block or the last message" in str(again.stats.unmasked)
    assert difference(cold.logits, again.logits) <= 1e-4


def test_a_question_counts_though_all_around_it_is_shared(chat: Chat) -> None:
    """Case B: 95 % shared, a unique question at the end."""
    chat.ask(max_tokens=1)
    chat.hole(HOLE)
    answers = [
        chat.ask(asking(text), approximate=True, store=False) for text in ("Yes or no?", "Why?")
    ]
    assert all(answer.stats.masked_tokens == BLOCK for answer in answers)
    assert difference(answers[0].logits[:1], answers[1].logits[:1]) > 1e-2


def test_the_divergence_is_measured_and_the_hole_mended(chat: Chat) -> None:
    chat.ask(max_tokens=1)
    chat.hole(HOLE)
    other = asking("Who saw it?")
    exact = chat.ask(other, read=False, store=False, max_tokens=1)
    masked = chat.ask(other, approximate=True, measure_kl=True, max_tokens=1)
    assert masked.stats.kl == pytest.approx(kl(exact.logits[0], masked.logits[0]), rel=1e-3)
    assert masked.stats.kl > 0
    assert chat.rows("kl")[-1] == (masked.stats.kl,)
    healed = chat.ask(other, approximate=True, measure_kl=True)
    assert (healed.stats.skip, healed.stats.kl) == ("full", None)
    assert difference(exact.logits, healed.logits[:1]) <= 1e-4


def kl(exact: Any, other: Any) -> float:
    a, b = (
        x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64)) for x in (exact, other)
    )
    return float((np.exp(a) * (a - b)).sum())


def test_stored_logits_give_an_exact_first_token(chat: Chat) -> None:
    cold = chat.ask()
    chat.hole(HOLE)
    again = chat.ask(approximate=True, measure_kl=True)
    assert (again.stats.skip, again.stats.masked_tokens) == ("approximate", BLOCK)
    assert again.stats.computed_tokens == again.stats.forwarded_prompt_tokens == 0
    assert difference(cold.logits[:1], again.logits[:1]) <= 1e-5
    assert again.stats.kl is not None


def test_answers_to_one_prompt_share_what_is_masked(chat: Chat) -> None:
    chat.ask(max_tokens=1)
    chat.hole(HOLE)
    events = chat.engine.generate(
        Request(messages=asking("Who?"), approximate=True, measure_kl=True, n=2, max_tokens=3)
    )
    ends = [event for event in events if isinstance(event, End)]
    assert [end.stats.masked_tokens for end in ends] == [BLOCK, BLOCK]
    assert {end.stats.skip for end in ends} == {"approximate"}
    chat.engine.call(lambda worker: worker.storage.store.flush(30))
    assert chat.rows("masked_tokens, skip")[-2:] == [(BLOCK, "approximate")] * 2


def test_an_exact_request_beside_it_is_exact(chat: Chat) -> None:
    chat.ask(max_tokens=1)
    chat.hole(HOLE)
    other = asking("Who saw it?")
    both = [
        chat.engine.generate(Request(messages=other, approximate=a, max_tokens=2))
        for a in (True, False)
    ]
    ends = [next(event for event in events if isinstance(event, End)) for events in both]
    assert [end.stats.masked_tokens for end in ends] == [BLOCK, 0]


def test_quantised_state_can_be_masked(model: Path, tmp_path: Path) -> None:
    for chat in opened(model, tmp_path, kv_bits=8, kv_group_size=32):
        exact = chat.ask(asking("Who?"), store=False)
        chat.ask(max_tokens=1)
        chat.hole(HOLE)
        masked = chat.ask(asking("Who?"), approximate=True)
        assert masked.stats.masked_tokens == BLOCK
        assert 1e-4 < difference(exact.logits[:1], masked.logits[:1]) < 0.5


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next"])
def test_other_kinds_of_state_are_refilled(kind: str, tmp_path: Path) -> None:
    folder = write_species(tmp_path / "model", kind)
    with (
        kvdb.open(tmp_path / "store", min_free_bytes=0) as store,
        Engine(store, str(folder), options=EngineOptions(BLOCK)) as engine,
    ):
        chat = Chat(store, engine)
        cold = run(engine, prompt_tokens(400), max_tokens=1)
        chat.hole(5)
        again = run(engine, prompt_tokens(400), approximate=True)
        assert again.stats.masked_tokens == 0
        assert "nothing can be masked" in str(again.stats.unmasked)
        assert difference(cold.logits, again.logits[:1]) <= 1e-4


def test_exact_and_approximate_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="approximate"):
        Request(text="x", reuse="exact", approximate=True)
    with pytest.raises(UsageError, match="approximate"):
        Request(text="x", measure_kl=True)


def test_what_memory_held_before_does_not_matter(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of zero does not take a NaN away."""
    from engine.cachekinds import numpy_view
    from engine.memory import unwritten

    def poisoned(specs: Any, tokens: int) -> Any:
        arrays = unwritten(specs, tokens)
        for array in arrays:
            numpy_view(array)[...] = np.nan
        return arrays

    chat.ask(max_tokens=1)
    chat.hole(HOLE)
    other = asking("Who saw it?")
    clean = chat.ask(other, approximate=True)
    monkeypatch.setattr("engine.restore.unwritten", poisoned)
    again = chat.ask(other, approximate=True)
    assert again.stats.masked_tokens == BLOCK
    assert np.isfinite(again.logits).all()
    assert difference(clean.logits, again.logits) <= 1e-5


def test_the_last_question_is_a_users() -> None:
    def parts(*roles: str) -> list[Segment]:
        return [Segment("message", 10 * (i + 1), role) for i, role in enumerate(roles)]

    assert last_question(parts("user", "assistant", "user", "assistant", "tool")) == 20
    assert last_question(parts("assistant", "tool")) == 10
    assert last_question([Segment("text", 50)]) == 0
