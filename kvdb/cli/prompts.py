"""Prompts from options: text, a request body or token ids. What ``generate`` runs, ``explain``
explains, so both read them here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any, TypeVar

import click

from kvdb.errors import PromptError, UsageError

Function = TypeVar("Function", bound=Callable[..., Any])
# What editors on other systems put before the text is no part of it.
TEXT_FILE = click.File("r", encoding="utf-8-sig")


def prompt_options(messages: str, *aliases: str) -> Callable[[Function], Function]:
    """The options that give a prompt. ``messages`` is the help of ``--messages``, which may have
    ``aliases``."""

    def add(function: Function) -> Function:
        for option in (
            click.option(
                "--ignore-chat-template", is_flag=True, help="Take the prompt as raw text."
            ),
            click.option(
                "--tokens",
                "tokens_file",
                type=TEXT_FILE,
                metavar="FILE",
                help="Token ids, apart by spaces or commas or as JSON, instead of a prompt.",
            ),
            click.option(
                *aliases,
                "--messages",
                "messages_file",
                type=TEXT_FILE,
                metavar="FILE",
                help=messages,
            ),
            click.option("--system-prompt", help="System message before the prompt."),
            click.option(
                "-p", "--prompt", help="Message to the model; - reads it from standard input."
            ),
        ):
            function = option(function)
        return function

    return add


def read_prompt(
    text: str | None, body: IO[str] | None, tokens: IO[str] | None, *, or_text: bool = False
) -> dict[str, Any]:
    """The prompt as keywords of an engine request: ``text``, ``messages`` (with ``tools``) or
    ``tokens``. ``or_text`` takes a body that is no JSON for a plain text. Raises PromptError or
    UsageError."""
    if sum(given is not None for given in (text, body, tokens)) != 1:
        raise click.UsageError("Give the prompt with one of --prompt, --messages and --tokens.")
    try:
        if tokens is not None:
            return {"tokens": _token_ids(tokens.read())}
        if body is not None:
            content = body.read()
            if not or_text or content.lstrip()[:1] in ("{", "["):
                return _chat(content)
        else:
            content = sys.stdin.read() if text == "-" else str(text)
    except UnicodeDecodeError as error:
        raise PromptError(f"The prompt is not UTF-8 text: {error}.") from error
    except ValueError as error:
        raise PromptError(f"The prompt cannot be read: {error}.") from error
    if not content.strip():
        raise PromptError("The prompt is empty.")
    return {"text": content}


def as_chat(
    prompt: Mapping[str, Any], *, template: bool, raw: bool, system: str | None
) -> dict[str, Any]:
    """A text becomes a user's message where the model has a chat ``template`` and ``raw`` is not
    asked for; ``system`` is a message before it. Raises UsageError."""
    chat = dict(prompt)
    if "text" in chat and not raw and template:
        chat["messages"] = [{"role": "user", "content": chat.pop("text")}]
    if system is not None:
        if "messages" not in chat:
            raise UsageError("--system-prompt needs a chat template and a prompt that uses it.")
        chat["messages"] = [{"role": "system", "content": system}, *chat["messages"]]
    return chat


def template_options(text: str | None) -> dict[str, Any]:
    """``--chat-template-config``. Raises UsageError."""
    if text is None:
        return {}
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--chat-template-config is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise UsageError("--chat-template-config must be a JSON object.")
    return document


def _chat(content: str) -> dict[str, Any]:
    from engine.prompt.bodies import read_body

    request = read_body(content).request()
    return {key: value for key, value in request.items() if value}


def _token_ids(text: str) -> list[int]:
    if text.lstrip().startswith("["):
        ids = json.loads(text)
    else:
        ids = [int(piece) for piece in text.replace(",", " ").split()]
    if not all(type(token) is int for token in ids):
        raise ValueError("token ids must be whole numbers")
    if not ids:
        raise PromptError("The prompt is empty.")
    return list(ids)
