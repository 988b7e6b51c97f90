"""kvdb sequences save: a prompt that begins with what was saved hits, in whatever process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvdb
from engine import Engine, EngineOptions, Request
from engine.sequences import warm_up
from kvdb.clock import Environment
from kvdb.opening import Options, open_store
from tests.cli.conftest import Run, one_sentence

SYSTEM = "You keep the log of a lighthouse. Answer in one line. " * 12
MESSAGES = [{"role": "system", "content": SYSTEM}]


def ask(run: Run, tiny: Path, messages: list[dict[str, str]], tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "ask.json"
    file.write_text(json.dumps(messages))
    done = run("generate", "--model", tiny, "--messages", file, "-m", 4, "--stats")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    return found


def test_a_chat_that_begins_with_saved_messages_hits(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "system.json"
    file.write_text(json.dumps(MESSAGES), "utf-8-sig")  # as editors on other systems write it
    saved = run("sequences", "save", "keeper", "--messages", file, "--model", tiny)
    assert saved.returncode == 0, saved.stderr
    again = run("sequences", "save", "keeper", "--messages", file, "--model", tiny)
    assert again.returncode == 2
    assert "keeper" in one_sentence(again)
    assert run("evict", "--to", "0", "--yes").returncode == 0  # what is held stays
    stats = ask(run, tiny, [*MESSAGES, {"role": "user", "content": "Any ships?"}], tmp_path)
    held = int(saved.stderr.split(" holds ")[1].split()[0])
    assert held > len(SYSTEM)
    assert stats["restored_tokens"] >= held  # to the last token, though another role follows
    assert run("sequences", "drop", "keeper").returncode == 0


def test_what_a_request_or_a_block_holds_can_be_saved(run: Run, tiny: Path, tmp_path: Path) -> None:
    stats = ask(run, tiny, [{"role": "user", "content": SYSTEM}], tmp_path)
    (request,) = json.loads(run("ls", "requests").stdout)
    done = run("sequences", "save", "first", "--request", request["id"], "--ttl", 3600)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split(" holds ")[1].split()[0]) >= stats["prompt_tokens"]
    (row,) = json.loads(run("sequences", "list").stdout)
    assert row["expires"] is not None
    assert run("sequences", "save", "b", "--block", row["tip"][:16]).returncode == 0
    assert run("sequences", "save", "c", "--request", 99).returncode == 10
    assert run("sequences", "save", "d").returncode == 2
    assert run("sequences", "save", "d", "--request", 1, "--block", "ab").returncode == 2


def test_a_saved_sequence_ends_with_its_ttl_and_is_warmed_up_while_it_lasts(
    run: Run,
    tiny: Path,
    tmp_path: Path,
    environment: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVDB_CACHE", environment["KVDB_CACHE"])
    path = Path(environment["KVDB_STORE"])
    file = tmp_path / "system.json"
    file.write_text(json.dumps(MESSAGES))
    save = ("sequences", "save", "short", "--messages", file, "--model", tiny, "--ttl", 3600)
    assert run(*save).returncode == 0
    warm = EngineOptions(warm=("short", "nobody", Request(messages=MESSAGES, client="again")))
    with kvdb.open(path, ram=1 << 24) as store, Engine(store, str(tiny), options=warm) as engine:
        assert "nobody could not be warmed up" in caplog.text
        again = warm_up(engine, store, ["short"])[0]
        assert (again.lost, again.nbytes, again.ram) == (0, 0, True)
        tokens = store.find_sequence("short").tokens().tolist()
        *_, end = engine.generate(Request(tokens=tokens, max_tokens=1))
        assert (end.stats.skip, end.stats.bytes_read) == ("full", 0)
    later = Environment(now_us=lambda: Environment().now_us() + 3_601_000_000)
    with open_store(path, Options(), environment=later) as store:
        assert store.match(store.namespaces()[0], tokens).complete
        store.evict(to_bytes=0)
        assert store.sql("SELECT name FROM sequences").rows == []
        assert store.match(store.namespaces()[0], tokens).matched == 0


def test_a_ceiling_of_memory_refuses_what_cannot_fit(run: Run, tiny: Path) -> None:
    for verb in (("generate",), ("sequences", "save", "keeper")):
        done = run(*verb, "--model", tiny, "-p", SYSTEM, "--max-memory", "1MB")
        assert done.returncode == 1
        assert "max_memory" in one_sentence(done)
    assert run("generate", "--model", tiny, "-p", SYSTEM, "--max-memory", "90%").returncode == 0
