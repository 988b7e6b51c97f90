"""``kvdb serve`` as a program: it says what goes on, ends well, and forgets nothing when killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import httpx
import pytest
import uvicorn
from click.testing import CliRunner

import kvdb
from engine.http.lifecycle import Server
from kvdb.cli import cli
from tests.http.test_service import until

SECONDS = 60
CHAT = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 8}]


class Program:
    """A server in a process of its own, and what it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    @property
    def url(self) -> str:
        until(lambda: self.process.poll() is not None or " is ready" in self.said, SECONDS)
        found = re.search(r"at (http://\S+)", self.said)
        assert found, self.said
        return found[1]

    def ask(self, **more: Any) -> dict[str, Any]:
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 4, **more}
        answer: dict[str, Any] = httpx.post(f"{self.url}/chat/completions", json=body).json()
        return answer

    def end(self, *signals: signal.Signals) -> int:
        for each in signals:
            self.process.send_signal(each)
        code = self.process.wait(SECONDS)
        self._reader.join()
        return code


@pytest.fixture
def home(tmp_path: Path, chat_folder: Path) -> Path:
    (tmp_path / "kvdb.toml").write_text(
        f'block_tokens = 16\nmin_free_bytes = 0\n[models."{chat_folder}"]\naliases = ["tiny"]\n'
    )
    return tmp_path


@contextmanager
def serve(
    home: Path,
    *options: str,
    program: Sequence[str] = ("-m", "kvdb"),
    before: Sequence[str] = (),
    **environment: str,
) -> Iterator[Program]:
    """``before`` are words before the command line, such as those that run it elsewhere."""
    arguments = [*before, sys.executable, *program, "serve", "--store", str(home / "store")]
    process = subprocess.Popen(
        [*arguments, "--port", "0", *options],
        cwd=home,
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    program = Program(process)
    try:
        yield program
    finally:
        process.kill()
        program.end()


@contextmanager
def streaming(server: Program, asked: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The lines of an answer that has begun."""
    with httpx.stream("POST", f"{server.url}/chat/completions", json=asked) as answer:
        lines = answer.iter_lines()
        until(lambda: "content" in next(lines))
        yield lines


def test_what_was_answered_hits_however_it_ended(home: Path) -> None:
    with serve(home, "--drain-seconds", "0.2") as server:
        asked = {"model": "tiny", "messages": CHAT, "max_tokens": 100_000, "stream": True}
        with streaming(server, asked) as lines:
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert '"code":"stopping"' in rest[-2]
        assert server.end() == 0
        assert "0 requests finished, 1 parked; what was stored is durable." in server.said
        assert re.search(r"is ready: loaded in [\d.]+ s, warmed up in", server.said)
    with serve(home, "--drain-seconds", "3600") as server:
        first = server.ask(max_tokens=40)
        assert first["usage"]["kvdb"]["skip"] == "full"
        text = first["choices"][0]["message"]["content"]
        # The writer works behind the answer: the next request waits for what it could meet.
        server.ask(max_tokens=1)
        # A second signal ends it at once: nothing is said or made durable any more.
        with streaming(server, asked):
            server.process.send_signal(signal.SIGTERM)
            until(lambda: "Stopping" in server.said)
            assert server.end(signal.SIGTERM) == 128 + signal.SIGTERM
    following = [*CHAT, {"role": "assistant", "content": text}, {"role": "user", "content": "Go"}]
    with serve(home, "--drain-seconds", "3600") as server:
        assert server.ask()["usage"]["kvdb"]["skip"] == "full"
        again = server.ask(messages=following)["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] - 9
        # One that runs may end; whoever does not want to wait for it asks twice.
        with streaming(server, {**asked, "max_tokens": 300}) as lines:
            server.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.end() == 0
        assert "1 requests finished, 0 parked; what was stored is durable" in server.said
    with kvdb.open(home / "store") as store:
        assert not store.verify().problems


def test_without_a_usable_store_it_serves_and_says_so_once(home: Path) -> None:
    (home / "store").write_text("no store")
    with serve(home) as server:
        for _ in range(2):
            assert server.ask()["usage"]["kvdb"]["skip"] == "none"
        assert server.end(signal.SIGTERM) == 0
        assert server.said.count("Going on without the store") == 1


@pytest.mark.parametrize(
    ("options", "environment", "word"),
    [
        (("--model", "/nowhere"), {}, "no model"),
        (("--port", "70000"), {}, "port"),
        ((), {"KVDB_SERVE_PORTS": "1"}, "KVDB_SERVE_PORTS"),
        ((), {"KVDB_SERVE_MAX_WAITING": "-1"}, "MAX_WAITING"),
        (("--host", "0.0.0.0"), {}, "key"),  # noqa: S104 - it is refused
        (("--host", "127.0.0.1", "--port", "TAKEN"), {}, "cannot be listened on"),
    ],
)
def test_what_cannot_be_served_is_said(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    environment: dict[str, str],
    word: str,
) -> None:
    monkeypatch.setattr(Server, "run", lambda *_, **__: pytest.fail("It is served."))
    monkeypatch.chdir(home)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        mock.patch.dict(os.environ, environment),
    ):
        given = [str(taken.getsockname()[1]) if part == "TAKEN" else part for part in options]
        arguments = ["serve", "--store", str(home / "store"), "--port", "0", *given]
        done = CliRunner().invoke(cli, arguments)
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit), done.exception
    assert word in done.stderr


def test_the_loop_gets_the_interpreter_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's thread may keep it 5 ms by default, which each write of a first token waits for."""
    seen: list[float] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_: seen.append(sys.getswitchinterval()))
    before = sys.getswitchinterval()
    server = Server(uvicorn.Config("unused"), cast(Any, None), (), drain_seconds=1, say=print)
    server.run()
    assert seen[0] < 0.001
    assert sys.getswitchinterval() == before
