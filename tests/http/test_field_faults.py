"""Faults of serving that users of other engines reported; docs/field_faults.md lists them all."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_model import write_chat_model

from engine.memory import held_bytes
from kvdb.durable import FileSystem
from tests.http.conftest import TOOL_TEMPLATE, Running, StartServer

FOX = "The quick brown fox jumps over the lazy dog. "
PATH = "/v1/chat/completions"
# Set in a process that runs one test.
ALONE = "TEST_ALONE"


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


def ask(server: Running, text: str, tenant: str = "", **more: Any) -> dict[str, Any]:
    headers = {"x-kvdb-tenant": tenant} if tenant else {}
    answer = server.post(PATH, body(text, **{"max_tokens": 2, **more}), **headers)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_load_and_unload_race(start: StartServer, tmp_path: Path) -> None:
    """omlx#2116: requests in a loop while models come and go: an answer, or a clean 503."""
    others = [
        write_chat_model(tmp_path / f"other{seed}", seed=seed, template=TOOL_TEMPLATE)
        for seed in (1, 2)
    ]
    server = start(others=others, max_models=2)
    names = ["tiny", *(other.name for other in others)]
    alone = {name: ask(server, FOX, model=name)["choices"][0]["message"] for name in names}
    done = threading.Event()

    def unload() -> None:
        while not done.wait(0.02):
            for name in server.service.models:
                server.pool.unload(name)

    def loop(first: int) -> list[int]:
        statuses = []
        for number in range(8):
            name = names[(first + number) % 3]
            answer = server.post(PATH, body(FOX, model=name, max_tokens=2))
            statuses.append(answer.status_code)
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["message"] == alone[name]
            else:
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["message"].endswith(".")
                assert int(answer.headers["retry-after"]) > 0
        return statuses

    disturber = threading.Thread(target=unload)
    disturber.start()
    try:
        with ThreadPoolExecutor(3) as threads:
            statuses = [each for loops in threads.map(loop, range(3)) for each in loops]
    finally:
        done.set()
        disturber.join()
    assert statuses.count(200) > 12


def test_memory_kept_after_unload(start: StartServer, tmp_path: Path) -> None:
    """omlx#1459. 32 MiB of weights: the first time also loads code, so the second is measured. In
    a process of its own: memory that other tests freed would be taken without growing."""
    if ALONE not in os.environ:
        command = [sys.executable, "-m", "pytest", "-q", "-k", "test_memory_kept_after_unload"]
        alone = {**os.environ, ALONE: "1"}
        done = subprocess.run([*command, __file__], env=alone, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert "1 passed" in done.stdout
        return
    size = {"vocab_size": 1 << 16, "hidden_size": 128, "head_dim": 64}
    server = start(model=write_chat_model(tmp_path / "big", template=TOOL_TEMPLATE, **size))
    (name,) = server.service.models
    assert server.store is not None
    for count in (2, 20):
        server.pool.guard.settle()
        before = held_bytes()
        for number in range(count):
            ask(server, f"{count}.{number} {FOX}")
        assert server.store.flush(30)
        loaded = held_bytes()
        assert server.pool.unload(name)
        after = held_bytes()
    assert loaded - before > 25 << 20
    assert after - before < 8 << 20


@pytest.mark.parametrize(
    ("path", "form"),
    [
        (PATH, {"type": "image_url", "image_url": {"url": "URL"}}),
        ("/v1/responses", {"type": "input_image", "image_url": "URL"}),
        ("/v1/messages", {"type": "image", "source": {"type": "url", "url": "URL"}}),
    ],
)
def test_a_url_to_a_port_of_this_machine_is_not_fetched(
    server: Running, path: str, form: dict[str, Any]
) -> None:
    """omlx#929, #1440."""
    with socket.create_server(("127.0.0.1", 0)) as inside:
        address = f"http://127.0.0.1:{inside.getsockname()[1]}/x.png"
        part = {key: _put(value, address) for key, value in form.items()}
        turn = {"role": "user", "content": [part]}
        asked = {"model": "tiny", "max_tokens": 1, "messages": [turn], "input": [turn]}
        answer = server.post(path, asked)
        assert answer.status_code == 400
        assert "image" in answer.json()["error"]["message"]
        inside.setblocking(False)
        with pytest.raises(BlockingIOError):
            inside.accept()


def _put(value: Any, address: str) -> Any:
    if isinstance(value, dict):
        return {key: _put(each, address) for key, each in value.items()}
    return address if value == "URL" else value


def test_statistics_drift(start: StartServer) -> None:
    """vLLM#25780: what clients were told, the history, the metrics and the disk agree."""
    server = start()
    asked: list[tuple[str, dict[str, Any]]] = []
    for number in range(6):
        text = FOX * (number % 3 + 1)
        turns = body(text)["messages"]
        asked += [
            (PATH, {"messages": turns, "max_tokens": 3}),
            ("/v1/completions", {"prompt": text, "max_tokens": 4}),
            ("/v1/responses", {"input": text, "max_output_tokens": 3}),
            ("/v1/messages", {"messages": turns, "max_tokens": 2}),
        ]

    def told(each: tuple[str, dict[str, Any]]) -> tuple[int, int, int]:
        usage = server.post(each[0], {"model": "tiny", **each[1]}).json()["usage"]
        if "cache_read_input_tokens" in usage:
            cached, made = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
            return usage["input_tokens"] + cached + made, cached, usage["output_tokens"]
        if "input_tokens" in usage:
            cached = usage["input_tokens_details"]["cached_tokens"]
            return usage["input_tokens"], cached, usage["output_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, usage["completion_tokens"]

    with ThreadPoolExecutor(6) as threads:
        usages = list(threads.map(told, asked))
    prompt, cached, generated = (sum(column) for column in zip(*usages, strict=True))
    assert 0 < cached < prompt
    rows = server.one(
        "SELECT count(*), sum(prompt_tokens), sum(restored_tokens), sum(generated_tokens), "
        "sum(computed_tokens + refilled_tokens + masked_tokens) FROM requests"
    )
    assert rows == (len(asked), prompt, cached, generated, prompt - cached)
    figures = httpx.get(f"{server.url}/metrics").text
    assert total(figures, "kvdb_requests_total") == len(asked)
    assert total(figures, "kvdb_prompt_tokens_total") == prompt
    assert total(figures, "kvdb_prompt_tokens_total", 'source="restored"') == cached
    assert total(figures, "kvdb_generated_tokens_total") == generated
    # And the bytes: parts, shards and files.
    parts = server.one("SELECT sum(nbytes) FROM parts")
    assert parts == server.one("SELECT sum(live_bytes) FROM shards WHERE state = 'live'")
    assert parts == server.one("SELECT sum(live_bytes) FROM capacity")
    assert server.store is not None
    files = [path.stat().st_size for path in (server.store.path / "shards").rglob("*.safetensors")]
    assert server.one("SELECT sum(nbytes) FROM shards") == (sum(files),)
    assert not server.store.verify(data=True).problems


def total(figures: str, name: str, label: str = "") -> float:
    found = re.findall(rf"^{name}\{{([^}}]*)\}} (\S+)$", figures, re.MULTILINE)
    assert found, name
    return sum(float(value) for labels, value in found if label in labels)


def test_thread_unsafe_tokenizer(start: StartServer) -> None:
    """omlx a045b6a: 32 chats at once; each has the tokens that it has alone."""
    server = start()
    texts = [
        f"{number} {chr(0x1F600 + number)} été {FOX * (number % 4 + 1)}" for number in range(32)
    ]
    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(lambda text: ask(server, text), texts))
    for text, before in zip(texts, together, strict=True):
        alone = ask(server, text)
        assert alone["usage"]["kvdb"]["skip"] == "full"  # the very same tokens
        assert alone["usage"]["prompt_tokens"] == before["usage"]["prompt_tokens"]
        assert alone["choices"] == before["choices"]


def test_one_tenant_floods_the_rest(start: StartServer) -> None:
    """omlx#2663: what one asks again and again evicts its own."""
    server = start()
    ask(server, FOX * 4, "calm")
    store = server.store
    assert store is not None
    (nbytes,) = server.one("SELECT sum(nbytes) FROM parts")
    store.set_quota(2 * nbytes, tenant="loud")
    for number in range(30):
        ask(server, f"{number} {FOX * 4}", "loud")
    assert ask(server, FOX * 4, "calm")["usage"]["kvdb"]["skip"] == "full"
    assert server.one("SELECT count(DISTINCT reason), max(reason) FROM evictions") == (1, "quota")
    used = "SELECT sum(live_bytes) FROM namespaces WHERE tenant = 'loud'"
    assert 0 < server.one(used)[0] <= 2 * nbytes


class StandingDisk(FileSystem):
    """A disk that writes nothing of blocks while it ``stands``."""

    def __init__(self) -> None:
        super().__init__()
        self.stands = False
        self.waiting = threading.Event()
        self.goes = threading.Event()

    def write(self, fd: int, buffers: Sequence[memoryview]) -> int:
        if self.stands:
            self.waiting.set()
            assert self.goes.wait(60)
        return super().write(fd, buffers)


def test_writes_stall_decode(start: StartServer) -> None:
    """omlx#1736: a throttled disk, at its worst: while it stands still, answers are completed."""
    disk = StandingDisk()
    server = start(fs=disk)
    ask(server, FOX)
    assert server.store is not None
    assert server.store.flush(30)
    disk.stands = True
    try:
        long = ask(server, FOX * 4, max_tokens=200, logit_bias={"1": -100})
        assert long["usage"]["completion_tokens"] == 200
        assert disk.waiting.wait(30)
        with server.client.chat.completions.create(
            **body(FOX * 5, max_tokens=200, logit_bias={"1": -100}), stream=True
        ) as stream:
            assert sum(bool(chunk.choices[0].delta.content) for chunk in stream) > 50
        assert any(server.store.unwritten())
    finally:
        disk.goes.set()
    assert server.store.flush(30)
    assert not server.store.verify(data=True).problems
