"""``kvdb generate`` on a tiny random model, and on a real one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

import kvdb
from kvdb.driver import sqlite3
from tests.cli.conftest import Done, Run, one_sentence
from tests.engine.chat_model import write_chat_model
from tests.support import shard_files

PROMPT = "The harbour lies in the lee of the island. " * 20
Generate = Callable[..., Done]


OPTIONS = ("-m", 8, "--stats")


@pytest.fixture
def generate(run: Run, tiny: Path) -> Generate:
    """In this process: MLX is loaded once."""

    def call(*arguments: object, **more: str) -> Done:
        return run("generate", "--model", tiny, *OPTIONS, *arguments, **more)

    return call


@pytest.fixture
def generate_alone(spawn: Run, tiny: Path) -> Generate:
    """In a process of its own."""

    def call(*arguments: object, **more: str) -> Done:
        return spawn("generate", "--model", tiny, *OPTIONS, *arguments, **more)

    return call


def stats(done: Done) -> dict[str, float]:
    """The statistics of a run that went well."""
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stderr.splitlines()[-1])
    return found


def test_the_same_prompt_in_two_processes(generate_alone: Generate) -> None:
    cold, warm = generate_alone("-p", PROMPT), generate_alone("-p", PROMPT)
    assert cold.stdout == warm.stdout != ""
    assert cold.stderr.count("\n") == warm.stderr.count("\n") == 1  # no library says a word
    first, second = stats(cold), stats(warm)
    assert first["restored_tokens"] == 0
    assert first["forwarded_prompt_tokens"] == first["prompt_tokens"] > 800
    assert second["restored_tokens"] == second["prompt_tokens"] == first["prompt_tokens"]
    assert second["computed_tokens"] == second["forwarded_prompt_tokens"] == 0
    assert second["skip"] == "full"


def test_the_usage_line(run: Run, tiny: Path) -> None:
    done = run("generate", "--model", tiny, "-m", 2, "-p", "hello")
    assert done.stderr.startswith("prompt: ")
    assert "0 restored" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_ways_to_give_a_prompt_agree(generate: Generate, tmp_path: Path) -> None:
    text = generate("-p", "hello")
    assert stats(generate("-p", "-", stdin="hello"))["skip"] == "full"
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([{"role": "user", "content": "hello"}]))
    messages = generate("--messages", file)
    assert (messages.stdout, stats(messages)["skip"]) == (text.stdout, "full")
    ids = [ord(character) for character in "user: hello\nassistant: "]
    for content in (json.dumps(ids), " ".join(map(str, ids)), ",".join(map(str, ids))):
        tokens = generate("--tokens", "-", stdin=content)
        assert (tokens.stdout, stats(tokens)["skip"]) == (text.stdout, "full")
    raw = generate("-p", "user: hello\nassistant: ", "--ignore-chat-template")
    assert (raw.stdout, stats(raw)["skip"]) == (text.stdout, "full")
    system = generate("-p", "hello", "--system-prompt", "You are brief.")
    assert stats(system)["prompt_tokens"] > len(ids)


def test_events_as_json(generate: Generate) -> None:
    done = generate("-p", "hello", "--json", "--logprobs", 2)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds == sorted(kinds, key=["progress", "token", "end"].index)
    tokens = [event for event in events if event["event"] == "token"]
    assert len(tokens) == events[-1]["stats"]["generated_tokens"] == 8
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)
    text = "".join(event.get("text", "") for event in events)
    assert text + "\n" == generate("-p", "hello").stdout


def test_sampling_options_reach_the_model(generate: Generate) -> None:
    hot = ("-p", "hello", "--temp", "1.5", "--top-p", "0.95", "--top-k", "50", "--min-p", "0.01")
    first, again, other = (generate(*hot, "--seed", seed) for seed in (1, 1, 2))
    assert first.stdout == again.stdout != other.stdout
    text = generate("-p", "hello").stdout
    stopped = generate("-p", "hello", "--stop", text[3])
    assert stopped.stdout == text[: text.index(text[3])] + "\n"


def test_an_answer_by_a_schema(run: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 2}')
    model = write_chat_model(tmp_path / "chat")
    answer = ("generate", "--model", model, "-p", "hello", "-m", 60, "--json-schema", schema)
    said = json.loads(run(*answer).stdout)
    assert set(said) <= {"yes", "no"}
    assert len(said) >= 2
    for text in ("{", '{"type": "objekt"}'):
        schema.write_text(text)
        done = run(*answer)
        assert (done.returncode, "JSON schema" in one_sentence(done)) == (2, True)


def test_approximate_skips_are_no_exact_ones(generate: Generate) -> None:
    for options in (("--approximate", "--reuse", "exact"), ("--measure-kl",)):
        done = generate("-p", "hello", *options)
        assert (done.returncode, "approximate" in one_sentence(done)) == (2, True)
    assert stats(generate("-p", "hello", "--approximate"))["masked_tokens"] == 0


def test_settings_reach_the_store(generate: Generate, run: Run) -> None:
    generate("-p", PROMPT, "--block-tokens", 64, "--reuse", "exact")
    generate("-p", PROMPT, "--kv-bits", 4, "--kv-group-size", 32)
    sql = (
        "SELECT n.block_tokens, min(b.exact) FROM namespaces AS n "
        "JOIN blocks AS b ON b.namespace_id = n.id WHERE b.origin = 'prefill' "
        "GROUP BY n.id ORDER BY 1"
    )
    rows = json.loads(run("query", "--arrays", sql).stdout)
    assert rows == [[64, 1], [256, 0]]


def test_without_a_store(generate: Generate, path: Path) -> None:
    assert stats(generate("-p", "hello", "--no-store"))["restored_tokens"] == 0
    assert not path.exists()


def _nothing(path: Path) -> None:
    path.write_text("a file")


def _others(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("years of work")


def _newer(path: Path) -> None:
    kvdb.open(path).close()
    connection = sqlite3.connect(path / "index.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()


def _damaged(path: Path) -> None:
    kvdb.open(path).close()
    (path / "index.sqlite").write_bytes(b"SQLite format 3\0" + b"\xa5" * 5000)


@pytest.mark.parametrize("spoil", [_nothing, _others, _newer, _damaged])
def test_a_store_that_cannot_be_used_stops_nobody(
    generate: Generate, path: Path, spoil: Callable[[Path], None]
) -> None:
    text = generate("-p", "hello", "--no-store").stdout
    spoil(path)
    done = generate("-p", "hello")
    assert (done.stdout, stats(done)["restored_tokens"]) == (text, 0)
    assert done.stderr.count("Going on without the store: ") == 1
    assert done.stderr.count("\n") == 2


def test_a_read_only_store_is_used(
    generate: Generate, path: Path, read_only: Callable[[Path], None]
) -> None:
    text = generate("-p", PROMPT).stdout
    read_only(path)
    done = generate("-p", PROMPT)
    assert (done.stdout, stats(done)["skip"]) == (text, "full")
    assert done.stderr.count("nothing new is stored") == 1
    assert done.stderr.count("\n") == 2


@pytest.mark.parametrize("harm", ["flipped", "truncated", "deleted"])
def test_damaged_shards_never_stop_or_bend_a_request(
    generate: Generate, run: Run, path: Path, harm: str
) -> None:
    text = generate("-p", PROMPT).stdout
    for shard in shard_files(path):
        data = bytearray(shard.read_bytes())
        shard.chmod(0o600)
        if harm == "deleted":
            shard.unlink()
        elif harm == "truncated":
            shard.write_bytes(data[: len(data) // 2])
        else:
            data[-len(data) // 3] ^= 1
            shard.write_bytes(data)
    done = generate("-p", PROMPT)
    assert (done.stdout, done.returncode) == (text, 0)
    rows = json.loads(run("query", "SELECT DISTINCT reason FROM evictions").stdout)
    assert {row["reason"] for row in rows} <= {"damaged", "missing"}
    assert rows
    assert stats(generate("-p", PROMPT))["skip"] == "full"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("-p", "x", "--model", "nowhere"), 1, "nowhere"),
        (("-p", "x", "--model", "/nowhere"), 1, "nowhere"),
        (("-p", "x", "--adapter-path", "/nowhere"), 1, "adapter"),
        (("-p", "x" * 5000), 2, "context"),
        (("--tokens", "-"), 2, "vocabulary"),
        (("-p", "x", "--block-tokens", "256", "--prefill-step-size", "100"), 2, "step"),
    ],
)
def test_bad_input(generate: Generate, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = generate(*arguments, stdin="1 2 300")
    assert (done.returncode, done.stdout) == (code, "")
    assert words in one_sentence(done)


@pytest.mark.parametrize("harm", ["no config", "bad config", "no weights", "cut weights"])
def test_a_corrupt_model_folder(generate: Generate, tiny: Path, tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    if harm == "no config":
        (folder / "config.json").unlink()
    elif harm == "bad config":
        (folder / "config.json").write_text("{")
    elif harm == "no weights":
        (folder / "model.safetensors").unlink()
    else:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    done = generate("-p", "x", "--model", folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert str(folder) in one_sentence(done)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -9),
    ],
)
def test_an_ended_run_keeps_its_prompt(
    generate: Generate, run: Run, environment: dict[str, str], tiny: Path, sent: int, code: int
) -> None:
    command = [
        sys.executable,
        "-m",
        "kvdb",
        "generate",
        "--model",
        str(tiny),
        "-p",
        PROMPT,
        "-m",
        "3000",
        "--json",
    ]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            seen += json.loads(line)["event"] == "token"
            if seen == 300:
                os.kill(process.pid, sent)
                break
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert run("verify", "--data").returncode == 0
    again = stats(generate("-p", PROMPT))
    assert again["restored_tokens"] >= again["prompt_tokens"] - 256
    if sent != signal.SIGKILL:
        assert again["skip"] == "full"


@pytest.mark.model
def test_a_real_model_answers(spawn: Run, models: Path) -> None:
    """That a second process answers alike, and computes nothing, the demo's test sees."""
    question = "What is the capital of France? Answer in one sentence."
    alone = {"OPENBLAS_NUM_THREADS": "1", "KVDB_MODELS": str(models)}
    done = spawn("generate", "-p", question, "--stats", **alone)
    assert (done.stdout, done.returncode) == ("The capital of France is Paris.\n", 0)


@pytest.mark.model
@pytest.mark.slow
def test_demo(spawn: Run, run: Run, models: Path, path: Path, tmp_path: Path) -> None:
    """As `make demo` runs it, but with less to read."""
    prompts = json.loads((resources.files("kvdb.cli") / "demo_prompt.json").read_text("utf-8"))
    prompts |= {"system": prompts["system"][:800], "history": []}
    (tmp_path / "prompts.json").write_text(json.dumps(prompts), "utf-8")
    shorter = ("--prompts", tmp_path / "prompts.json", "--max-tokens", 4)
    # Waiting BLAS threads spin: with more than one, whatever else runs makes this much slower.
    alone = {"OPENBLAS_NUM_THREADS": "1", "KVDB_MODELS": str(models)}
    done = spawn("demo", "--store", path, *shorter, **alone)
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line[:2] in ("1 ", "2 ", "3 ", "4 ")]
    assert len(table) == 5
    sql = "SELECT prompt_tokens, restored_tokens, computed_tokens FROM requests ORDER BY id"
    first, second, third, fourth = json.loads(run("query", "--arrays", sql).stdout)
    assert first[1:] == [0, first[0]]
    assert second[1:] == [second[0], 0]
    assert third[1] > 0.8 * third[0]
    # What the killed process had stored: nothing else stored that prompt before.
    assert fourth[1] >= 256
