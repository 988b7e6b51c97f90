"""``kvdb explain``: how much of a prompt is stored, where that ends, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from kvdb.cli.options import (
    RowId,
    block_tokens_option,
    open_store,
    prepare_tokenizers,
    settings,
    store_option,
)
from kvdb.cli.output import say, write_json
from kvdb.cli.prompts import as_chat, prompt_options, read_prompt, template_options
from kvdb.errors import ModelError

if TYPE_CHECKING:
    from engine.prompt.encode import Prompt
    from kvdb.config import Settings
    from kvdb.explain import Explanation, KeySpace
    from kvdb.store import Store


@dataclass(frozen=True, slots=True)
class _Model:
    """What of the options says which state a prompt would use."""

    name: str
    adapter: Path | None
    kv_bits: int | None
    kv_group_size: int


@click.command()
@prompt_options(
    "A request body (OpenAI or Anthropic), chat messages as JSON, or text; - for stdin.", "--file"
)
@click.option("--request", "request_id", type=RowId(), metavar="ID", help="A past request instead.")
@click.option(
    "--model",
    default="smollm2-135m",
    show_default=True,
    help="Folder, hub id or built-in name of an mlx-lm model; it is not loaded.",
)
@click.option("--adapter-path", type=click.Path(path_type=Path), help="Folder of an adapter.")
@click.option("--kv-bits", type=int, help="As for generate.")
@click.option("--kv-group-size", default=64, show_default=True, type=int, help="As for generate.")
@click.option("--chat-template-config", metavar="JSON", help="Options of the chat template.")
@block_tokens_option
@click.option("--json", "as_json", is_flag=True, help="The explanation as a JSON object.")
@store_option
def explain(
    prompt: str | None,
    system_prompt: str | None,
    messages_file: IO[str] | None,
    tokens_file: IO[str] | None,
    request_id: int | None,
    model: str,
    adapter_path: Path | None,
    kv_bits: int | None,
    kv_group_size: int,
    ignore_chat_template: bool,
    chat_template_config: str | None,
    as_json: bool,
) -> None:
    """Say how much of a prompt would hit, where it stops, and why.

    The prompt is compared with the stored one that it shares most with: the first differing token,
    the message or tool it lies in, the text around it on both sides, and what to do about it. With
    --request a past request is compared with what was stored before it. No model is loaded.
    """
    values = settings()
    prepare_tokenizers(values)
    if request_id is not None:
        if any(given is not None for given in (prompt, messages_file, tokens_file)):
            raise click.UsageError("Give either a prompt or --request.")
        with open_store(values, read_only=True) as store:
            _print(_explain_request(store, request_id), None, as_json)
        return
    given = read_prompt(prompt, messages_file, tokens_file, or_text=True)
    given["template_options"] = {
        **given.get("template_options", {}),
        **template_options(chat_template_config),
    }
    which = _Model(model, adapter_path, kv_bits, kv_group_size)
    with open_store(values, read_only=True) as store:
        encoded = _encode(store, which, given, raw=ignore_chat_template, system=system_prompt)
        explanation = _explain_prompt(store, which, encoded, values)
        _print(explanation, encoded.unstable_at(), as_json)


def _explain_request(store: Store, request_id: int) -> Explanation:
    from engine.prompt.tokenizer import namespace_decoder
    from kvdb.explain import explain_request

    rows = store.sql("SELECT namespace_id FROM requests WHERE id = ?", (request_id,)).rows
    text = None
    if rows and rows[0][0] is not None:
        text = namespace_decoder(store, rows[0][0])
    return explain_request(store, request_id, text)


def _encode(
    store: Store, which: _Model, given: dict[str, Any], *, raw: bool, system: str | None
) -> Prompt:
    """The prompt as the engine would encode it, with the tokens of answers that it remembers."""
    from engine.events import Request
    from engine.models import context_length, read_config
    from engine.prompt.encode import encode
    from engine.prompt.memory import TokenMemory
    from engine.prompt.tokenizer import load_tokenizer

    folder, tokenizer = _folder(which.name), None
    try:
        tokenizer = load_tokenizer(folder)
    except ModelError:
        if "tokens" not in given:
            raise
    template = tokenizer is not None and tokenizer.template is not None
    chat = as_chat(given, template=template, raw=raw, system=system)
    recall = None
    if tokenizer is not None:
        recall = partial(TokenMemory(tokenizer, store.answers).recall, b"")
    context = context_length(read_config(folder))
    return encode(Request(**chat), tokenizer, context, None, recall=recall)


def _folder(name: str) -> Path:
    from engine.models import find_local

    folder = find_local(name)
    if folder is None:
        raise ModelError(f"There is no model {name!r} on this machine: give its folder.")
    return folder


def _explain_prompt(store: Store, which: _Model, encoded: Prompt, values: Settings) -> Explanation:
    from kvdb.explain import explain_tokens

    decode = None if encoded.tokenizer is None else encoded.tokenizer.decode
    space = _key_space(store, which, values)
    return explain_tokens(store, space, encoded.tokens, segments=encoded.segments(), text=decode)


def _key_space(store: Store, which: _Model, values: Settings) -> KeySpace:
    """The namespace that ``kvdb generate`` would use with these options."""
    from engine.models import ModelOptions, quick_identity
    from kvdb.explain import KeySpace, find_space, key_spaces
    from kvdb.identity import check_block_tokens

    options = ModelOptions(
        adapter=which.adapter, kv_bits=which.kv_bits, kv_group_size=which.kv_group_size
    )
    wanted = KeySpace(
        None,
        None,
        which.name,
        quick_identity(_folder(which.name), options),
        check_block_tokens(values["block_tokens"]),
        which.kv_bits,
        None if which.kv_bits is None else which.kv_group_size,
    )
    with store.database.read() as connection:
        return find_space(key_spaces(connection), wanted)


def _print(explanation: Explanation, unstable_at: int | None, as_json: bool) -> None:
    if as_json:
        write_json({**explanation.as_dict(), "template_unstable_at": unstable_at})
        return
    for line in explanation.lines():
        click.echo(line)
    if unstable_at is not None:
        say(
            "Note: this chat template is not prefix-stable: what it writes for the first "
            f"{unstable_at} messages changes with the messages after them."
        )
