"""Marks: places in a chat up to which the state is held, by their exact tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_model import tool, write_chat_model
from tiny_model import write_tokenizer
from zoo import write_species

from engine import End, Engine, EngineOptions, Mark, Request
from engine.prompt.encode import Prompt, encode
from engine.prompt.tokenizer import load_tokenizer
from kvdb.store import Store

SYSTEM = "You are a helpful assistant that answers in short sentences. " * 3
MORE = "The quick brown fox jumps over the lazy dog. " * 3
CHAT = [
    {"role": "system", "content": SYSTEM + MORE},
    {"role": "user", "content": "Which city is it?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And the weather?"},
]
TOOLS = [tool("search"), tool("weather")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "chat")


def encoded(folder: Path, tools: Any = None) -> Prompt:
    request = Request(messages=CHAT, tools=tools)
    return encode(request, load_tokenizer(folder), None, None)


def text_before(prompt: Prompt, mark: Mark) -> str:
    (end,) = prompt.mark_ends([mark])
    assert prompt.tokenizer is not None
    return prompt.tokenizer.decode(prompt.tokens[:end].tolist())


def test_the_tokens_before_a_mark_end_where_it_is(folder: Path) -> None:
    plain, tools = encoded(folder), encoded(folder, TOOLS)
    # With the system message comes all that is written before the first other one.
    assert text_before(plain, Mark(0, 60)).endswith("dog. <|im_end|>\n")
    assert text_before(tools, Mark(0, 60)).endswith("</tools><|im_end|>\n")
    assert text_before(tools, Mark(0, 60, tool=True)).count('"function"') == 2
    assert text_before(plain, Mark(1, 60)).endswith("is it?<|im_end|>\n")
    assert text_before(plain, Mark(3, 60)).endswith("weather?<|im_end|>\n")
    for prompt in (plain, tools):
        inside = text_before(prompt, Mark(0, 60, characters=len(SYSTEM)))
        assert inside == "<|im_start|>system\n" + SYSTEM.strip()


def test_marked_prefixes_are_held_within_the_tenants_share(folder: Path, store: Store) -> None:
    store.set_quota(4096, tenant="small")
    with Engine(store, str(folder), options=EngineOptions(16)) as engine:
        for tenant, state in (("", "held"), ("small", "share full")):
            marks = (Mark(0, 60, characters=len(SYSTEM)), Mark(1, 600))
            request = Request(messages=CHAT, marks=marks, max_tokens=4, tenant=tenant)
            *_, end = engine.generate(request)
            assert isinstance(end, End)
            assert [(hold.ttl_seconds, hold.state) for hold in end.stats.holds] == [
                (60, state),
                (600, state),
            ]
        first, second = (hold.tokens for hold in end.stats.holds)
        assert 0 < first < second < end.stats.prompt_tokens
    with store.database.read() as connection:
        depths = connection.execute(
            "SELECT b.depth * 16 + b.token_count FROM sequences AS s "
            "JOIN blocks AS b ON b.id = s.tip_id ORDER BY 1"
        ).fetchall()
    assert [at for (at,) in depths] == [-(-first // 16) * 16, -(-second // 16) * 16]


def test_a_recurrent_model_goes_on_from_a_mark(tmp_path: Path, store: Store) -> None:
    """State of whole prompts only can be gone on from where it was kept."""
    folder = write_species(tmp_path / "chat", "qwen3_next")
    write_tokenizer(folder)
    system = {"role": "system", "content": "You answer. " * 4}
    with Engine(store, str(folder), options=EngineOptions(16)) as engine:
        restored = []
        for word in ("Paris", "Rome"):
            asked = {"role": "user", "content": f"{word}? " * 8}
            request = Request(messages=[system, asked], marks=(Mark(0, 60),), max_tokens=2)
            *_, end = engine.generate(request)
            assert isinstance(end, End)
            restored.append(end.stats.restored_tokens)
    assert restored == [0, len(f"system: {system['content']}\n")]
    assert end.stats.holds[0].tokens == restored[1]
    with store.database.read() as connection:
        (tokens,) = connection.execute(
            "SELECT b.depth * 16 + b.token_count FROM sequences AS s "
            "JOIN blocks AS b ON b.id = s.tip_id"
        ).fetchone()
    assert tokens == restored[1]
