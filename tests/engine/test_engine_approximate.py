"""Approximate skips: what is missing is left out, counted, measured, and never stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_model import write_chat_model
from tiny_model import Run, difference, run

import kvdb
from engine import Engine, EngineOptions, ModelOptions, Request
from kvdb.errors import UsageError
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
            "WHERE b.depth = ? AND p.part = 'kv:0' ORDER BY b.id LIMIT 1",
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
    assert stats.restored_tokens + stats.masked_tokens + stats.computed_tokens == stats.prompt_tokens
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
