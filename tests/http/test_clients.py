"""``kvdb serve --client``: what it prints is valid in its language, whatever a model is called."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import tomllib

import pytest

from engine.http.clients import CLIENTS, Target, configuration, target
from kvdb.cli.serve import CLIENTS as CHOICES
from kvdb.errors import UsageError
from tests.http.conftest import Running

# Ends a string in any of the languages, and starts a command in a shell.
HOSTILE = "/a b/'\"$(exit 3)`exit 4`\\"
TO = Target("http://127.0.0.1:8080", HOSTILE, local=True)
SHELL = ("claude-code", "opencode", "copilot", "curl")
LAST = {"claude-code": "claude", "opencode": "opencode", "copilot": "copilot", "curl": "curl"}


def _run(client: str) -> dict[str, str]:
    """Run a shell text with the client's program replaced by one that shows what it was given."""
    bash, env = shutil.which("bash"), shutil.which("env")
    assert bash is not None
    program = f'{LAST[client]}() {{ {env} -0; printf "ARGUMENTS=%s\\0" "${{@: -1}}"; }}\n'
    done = subprocess.run(
        [bash, "-e", "-c", program + configuration(client, TO)], capture_output=True, check=True
    )
    rows = done.stdout.decode().split("\0")
    return dict(row.split("=", 1) for row in rows if "=" in row)


def test_the_choices_are_the_clients() -> None:
    assert tuple(CLIENTS) == CHOICES


def test_shell_texts() -> None:
    assert _run("claude-code")["ANTHROPIC_MODEL"] == HOSTILE
    assert _run("claude-code")["ANTHROPIC_BASE_URL"] == TO.url
    assert _run("copilot")["COPILOT_MODEL"] == HOSTILE
    assert _run("copilot")["COPILOT_PROVIDER_BASE_URL"] == f"{TO.url}/v1"
    assert json.loads(_run("curl")["ARGUMENTS"])["model"] == HOSTILE
    config = json.loads(_run("opencode")["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == f"kvdb/{HOSTILE}"
    assert config["provider"]["kvdb"]["options"]["baseURL"] == f"{TO.url}/v1"


def test_codex_is_toml() -> None:
    config = tomllib.loads(configuration("codex", TO))
    assert config["model"] == HOSTILE
    assert config["model_providers"][config["model_provider"]]["base_url"] == f"{TO.url}/v1"


@pytest.mark.parametrize("client", ["openai-python", "anthropic-python"])
def test_python_is_python(client: str) -> None:
    constants = {
        node.value
        for node in ast.walk(ast.parse(configuration(client, TO)))
        if isinstance(node, ast.Constant)
    }
    assert {HOSTILE, "YOUR_KEY"} <= constants


@pytest.mark.parametrize("client", ["openai-python", "anthropic-python"])
def test_python_works(client: str, server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    exec(configuration(client, Target(server.url, "tiny", local=True)), {})
    assert "kvdb" in capsys.readouterr().out


def test_which_server() -> None:
    assert target("127.0.0.1", 8080, (), "m") == Target("http://127.0.0.1:8080", "m", local=True)
    assert target("::", 80, ("box.lan",), "m") == Target("http://box.lan:80", "m", local=False)
    assert target("::1", 80, (), "m").url == "http://[::1]:80"
    with pytest.raises(UsageError, match="--port"):
        target("127.0.0.1", 0, (), "m")
