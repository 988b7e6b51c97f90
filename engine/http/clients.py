"""How a client is pointed at this server: the configuration that ``kvdb serve --client`` prints.

Each is one text that can be used as it is: comments are comments in its language.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from shlex import quote

from engine.http.hosts import is_loopback
from kvdb.errors import UsageError

KEY = "YOUR_KEY"
ABOUT_KEY = f"# {KEY}: what `kvdb keys create` showed; any text while the server asks for no key.\n"


@dataclass(frozen=True, slots=True)
class Target:
    """A server as clients see it; ``url`` without ``/v1``. ``local``: nobody else can reach it."""

    url: str
    model: str
    local: bool


def target(host: str, port: int, allowed_hosts: tuple[str, ...], model: str) -> Target:
    """What clients are pointed at. Raises UsageError for a port that is not known yet."""
    if port == 0:
        raise UsageError("Port 0 is found when the server starts: give the port with --port.")
    name = host
    if _is_any(host):
        name = allowed_hosts[0] if allowed_hosts else "127.0.0.1"
    shown = f"[{name}]" if ":" in name else name
    return Target(f"http://{shown}:{port}", model, is_loopback(host))


def _is_any(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def configuration(client: str, to: Target) -> str:
    """The text for one of CLIENTS."""
    return CLIENTS[client](to)


def _exports(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={quote(value)}\n" for name, value in variables.items())


def _claude_code(to: Target) -> str:
    return (
        '# Claude Code: in the shell that starts it, or under "env" in ~/.claude/settings.json.\n'
        + ABOUT_KEY
        + _exports(
            {
                "ANTHROPIC_BASE_URL": to.url,
                "ANTHROPIC_AUTH_TOKEN": KEY,
                "ANTHROPIC_MODEL": to.model,
                "ANTHROPIC_DEFAULT_OPUS_MODEL": to.model,
                "ANTHROPIC_DEFAULT_SONNET_MODEL": to.model,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": to.model,
            }
        )
        + "# It would begin each prompt with a line that differs between conversations: nothing\n"
        "# behind it could be shared.\n"
        + _exports(
            {
                "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "API_TIMEOUT_MS": "3600000",
            }
        )
        + "claude\n"
    )


def _codex(to: Target) -> str:
    text = json.dumps  # what JSON escapes, TOML does too
    return (
        "# Codex: at the top of ~/.codex/config.toml (a project's own may not set a provider).\n"
        "# Then: KVDB_KEY=YOUR_KEY codex\n"
        + ABOUT_KEY
        + "# Codex warns that it knows no metadata of the model; that is harmless.\n"
        f"model = {text(to.model)}\n"
        'model_provider = "kvdb"\n'
        "\n"
        "[model_providers.kvdb]\n"
        'name = "kvdb"\n'
        f"base_url = {text(to.url + '/v1')}\n"
        'env_key = "KVDB_KEY"\n'
        'wire_api = "responses"\n'
        "stream_idle_timeout_ms = 3600000\n"
    )


def _opencode(to: Target) -> str:
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"kvdb/{to.model}",
        "small_model": f"kvdb/{to.model}",
        "provider": {
            "kvdb": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "kvdb",
                "options": {"baseURL": f"{to.url}/v1", "apiKey": KEY, "timeout": False},
                "models": {to.model: {"name": to.model}},
            }
        },
    }
    return (
        "# OpenCode: in the shell that starts it, or the JSON alone as a project's opencode.json.\n"
        + ABOUT_KEY
        + _exports({"OPENCODE_CONFIG_CONTENT": json.dumps(config, indent=2)})
        + "opencode\n"
    )


def _copilot(to: Target) -> str:
    return (
        "# GitHub Copilot CLI: in the shell that starts it. COPILOT_OFFLINE keeps it from asking\n"
        "# GitHub for anything; without it, a sign-in adds GitHub's own tools.\n"
        + ABOUT_KEY
        + _exports(
            {
                "COPILOT_PROVIDER_BASE_URL": f"{to.url}/v1",
                "COPILOT_PROVIDER_TYPE": "openai",
                "COPILOT_PROVIDER_API_KEY": KEY,
                "COPILOT_MODEL": to.model,
                "COPILOT_OFFLINE": "true",
            }
        )
        + "copilot\n"
    )


def _cursor(to: Target) -> str:
    local = (
        "# This address is of this machine only: put a proxy with a public https address before\n"
        "# the server (allowed_hosts in kvdb.toml names it), make a key, and enter that address.\n"
    )
    return (
        "# Cursor: Settings > Cursor Settings > Models > API Keys. Not tried with a real Cursor.\n"
        "# Cursor's own servers call the address, so the internet must reach it. Tab completion\n"
        "# keeps Cursor's model, and not every mode takes a model of one's own.\n"
        + (local if to.local else "")
        + f"OpenAI API Key: {KEY}\n"
        f"Override OpenAI Base URL: {to.url}/v1\n"
        f"Add model: {to.model}\n"
    )


def _openai_python(to: Target) -> str:
    return (
        f"# pip install openai\n{ABOUT_KEY}"
        "from openai import OpenAI\n"
        "\n"
        f"client = OpenAI(base_url={to.url + '/v1'!r}, api_key={KEY!r})\n"
        "answer = client.chat.completions.create(\n"
        f"    model={to.model!r},\n"
        '    messages=[{"role": "user", "content": "Say hello."}],\n'
        ")\n"
        "print(answer.choices[0].message.content)\n"
        "print(answer.usage)\n"
    )


def _anthropic_python(to: Target) -> str:
    return (
        f"# pip install anthropic\n{ABOUT_KEY}"
        "from anthropic import Anthropic\n"
        "\n"
        f"client = Anthropic(base_url={to.url!r}, api_key={KEY!r})\n"
        "answer = client.messages.create(\n"
        f"    model={to.model!r},\n"
        "    max_tokens=100,\n"
        '    messages=[{"role": "user", "content": "Say hello."}],\n'
        ")\n"
        "print(answer.content[0].text)\n"
        "print(answer.usage)\n"
    )


def _curl(to: Target) -> str:
    body = {
        "model": to.model,
        "messages": [{"role": "user", "content": "Say hello."}],
        "stream": True,
    }
    return (
        f"{ABOUT_KEY}"
        f"curl -N {quote(to.url + '/v1/chat/completions')} \\\n"
        f"  -H 'authorization: Bearer {KEY}' \\\n"
        "  -H 'content-type: application/json' \\\n"
        f"  -d {quote(json.dumps(body))}\n"
    )


CLIENTS: dict[str, Callable[[Target], str]] = {
    "claude-code": _claude_code,
    "codex": _codex,
    "opencode": _opencode,
    "copilot": _copilot,
    "cursor": _cursor,
    "openai-python": _openai_python,
    "anthropic-python": _anthropic_python,
    "curl": _curl,
}
