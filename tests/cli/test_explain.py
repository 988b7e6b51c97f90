"""``kvdb explain``: what it says, as text and as JSON, and what it does with what is no prompt."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

SYSTEM = {
    "role": "system",
    "content": "You are terse. It is 10:22:01 now. " + "Mind the gap. " * 20,
}
USER = {"role": "user", "content": "What is the capital of France?"}
LATER = {**SYSTEM, "content": SYSTEM["content"].replace("10:22:01", "11:35:40")}
GENERATE = ("--max-tokens", 2, "--block-tokens", 16)


def body(path: Path, messages: list[dict[str, Any]], **more: Any) -> Path:
    path.write_text(json.dumps({"messages": messages, **more}))
    return path


@pytest.fixture
def asked(run: Run, tiny: Path, tmp_path: Path) -> Path:
    """A store that has seen one chat; the file of a chat that begins with another time."""
    first = body(tmp_path / "first.json", [SYSTEM, USER])
    assert run("generate", "--model", tiny, "--messages", first, *GENERATE).returncode == 0
    return body(tmp_path / "second.json", [LATER, USER])


def test_what_generate_then_restores(run: Run, tiny: Path, asked: Path) -> None:
    options = ("--model", tiny, "--block-tokens", 16)
    told = run("explain", *options, "--file", asked, "--json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    text = f"system: {SYSTEM['content']}"
    at = text.index("10:22:01")
    # The tiny tokenizer makes one token a character; the first different one is the hour's last.
    assert found["differing_token"] == at + 1
    assert (found["code"], found["where"]) == ("timestamp", "system prompt")
    assert "It is 1»0«:22:01" in found["stored_text"]
    assert "It is 1»1«:35:40" in found["prompt_text"]
    done = run("generate", "--model", tiny, "--messages", asked, "--stats", *GENERATE)
    stats = json.loads(done.stderr.splitlines()[-1])
    assert found["hit_tokens"] == stats["restored_tokens"] == at + 1
    assert found["prompt_tokens"] == stats["prompt_tokens"]

    past = run("explain", "--request", 2)
    assert past.returncode == 0
    assert "Why: A date or time differs" in past.stdout
    assert f"It stops at token {at + 1} in system prompt." in past.stdout
    again = run("explain", *options, "--file", asked, "--json")
    assert json.loads(again.stdout)["code"] == "hit"


def test_prompts_from_everywhere(run: Run, tiny: Path, asked: Path, tmp_path: Path) -> None:
    options = ("explain", "--model", tiny, "--block-tokens", 16, "--json")
    text = tmp_path / "prompt.txt"
    text.write_text(USER["content"])
    answers = [
        run(*options, "--prompt", USER["content"]),
        run(*options, "--prompt", "-", stdin=USER["content"]),
        run(*options, "--file", text),
        run(*options, "--file", "-", stdin=json.dumps([USER])),
        run(*options, "--file", "-", stdin=json.dumps({"input": USER["content"]})),
    ]
    assert [answer.returncode for answer in answers] == [0] * 5
    assert len({answer.stdout for answer in answers}) == 1
    anthropic = {"system": SYSTEM["content"], "messages": [USER], "max_tokens": 5}
    told = json.loads(run(*options, "--file", "-", stdin=json.dumps(anthropic)).stdout)
    assert told["code"] == "hit"
    tokens = json.dumps(list(b"system: You are no one"))
    told = json.loads(run(*options, "--tokens", "-", stdin=tokens).stdout)
    assert told["differing_token"] == len("system: You are ")
    split = run(*options, "--prompt", USER["content"], "--system-prompt", SYSTEM["content"])
    assert json.loads(split.stdout)["code"] == "hit"


def test_another_block_size_is_another_namespace(run: Run, tiny: Path, asked: Path) -> None:
    told = run(
        "explain", "--model", tiny, "--block-tokens", 32, "--file", asked.parent / "first.json"
    )
    assert "It is stored in blocks of 16 tokens." in told.stdout
    assert "0 of " in told.stdout


def test_nothing_heavy_is_loaded(
    run: Run, environment: dict[str, str], tiny: Path, asked: Path
) -> None:
    code = (
        "import atexit, sys; from kvdb.cli import cli\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        f"cli(['explain', '--model', {str(tiny)!r}, '--file', {str(asked)!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert not {"mlx", "mlx_lm", "transformers", "torch"} & set(done.stderr.split())


BAD: dict[str, tuple[str, str]] = {
    "empty": ("", "is empty"),
    "blank": (" \n", "is empty"),
    "cut JSON": ('{"messages": [{"role": "us', "cannot be read as JSON"),
    "a wrong role": ('[{"role": "boss", "content": "x"}]', "role must be one of"),
    "an image": (
        '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
        "only text",
    ),
    "a lone surrogate": ('[{"role": "user", "content": "\\ud800"}]', "not valid text"),
    "a lone surrogate in a tool": (
        '{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "\\udfff"}]}',
        "not valid text",
    ),
    "no messages": ('{"messages": []}', "is empty"),
    "deep": ("[" * 50_000, "nested too deeply"),
    "a deep tool": (
        '{"messages": [{"role": "user", "content": "x"}], "tools": ['
        + ('{"a": ' * 900 + "1" + "}" * 900)
        + "]}",
        "nested too deeply",
    ),
    "an empty text": ('{"prompt": ""}', "is empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_prompt_is_refused(run: Run, tiny: Path, asked: Path, name: str) -> None:
    content, says = BAD[name]
    done = run("explain", "--model", tiny, "--file", "-", stdin=content)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1


def test_ten_megabytes(run: Run, tiny: Path, asked: Path) -> None:
    """As generate does: a prompt beyond the model's context is refused, and at once."""
    text = json.dumps([SYSTEM, {**USER, "content": "Bonjour, monde. " * 650_000}])
    for verb in ("explain", "generate"):
        done = run(verb, "--model", tiny, "--messages", "-", stdin=text)
        assert (done.returncode, done.stdout) == (2, "")
        assert "the model's context holds 4096 tokens" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "one of --prompt"),
        (["--prompt", "x", "--request", "1"], 2, "either a prompt or --request"),
        (["--request", "99"], 2, "no request 99"),
        (["--prompt", "x", "--model", "/nowhere/at/all"], 1, "no model"),
        (["--prompt", "x", "--kv-bits", "7"], 2, "kv_bits must be"),
        (["--prompt", "x", "--block-tokens", "17"], 2, "block_tokens"),
        (["--file", "/nowhere"], 2, "No such file"),
        (["--prompt", "x", "--chat-template-config", "{"], 2, "is not JSON"),
    ],
)
def test_wrong_use(
    run: Run, tiny: Path, asked: Path, arguments: list[str], code: int, says: str
) -> None:
    if "--model" not in arguments:
        arguments = [*arguments, "--model", str(tiny)]
    done = run("explain", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr


def test_without_a_store(run: Run, tiny: Path, tmp_path: Path) -> None:
    done = run("explain", "--model", tiny, "--prompt", "x", "--store", tmp_path / "none")
    assert done.returncode == 10


def test_text_for_people_is_safe_on_a_terminal(run: Run, tiny: Path, asked: Path) -> None:
    text = json.dumps([{**SYSTEM, "content": "You are \x1b[31mred\x07"}, USER])
    done = run("explain", "--model", tiny, "--block-tokens", 16, "--file", "-", stdin=text)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.stdout)
    assert "\\x1b" in done.stdout
