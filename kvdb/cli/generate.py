"""``kvdb generate``: text from a model, with state from the store."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from kvdb.cli.options import (
    block_tokens_option,
    max_memory_option,
    open_store,
    prepare_engine,
    setting_option,
    settings,
    store_option,
)
from kvdb.cli.output import human_bytes, say
from kvdb.cli.progress import progress
from kvdb.cli.prompts import as_chat, prompt_options, read_prompt, template_options
from kvdb.errors import KvdbError, UsageError

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.events import End, Event, Request, Stats
    from kvdb.config import Settings
    from kvdb.store import Store

TERMINATED = 143


@click.command()
@click.option(
    "--model",
    default="smollm2-135m",
    show_default=True,
    help="Folder, hub id or built-in name of an mlx-lm model.",
)
@prompt_options("Chat messages as a JSON list, or a request body, instead of a prompt.")
@click.option(
    "-m",
    "--max-tokens",
    default=100,
    show_default=True,
    type=click.IntRange(min=1),
    help="Most tokens to generate.",
)
@click.option(
    "--temp",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Sampling temperature; 0 takes the likeliest token.",
)
@click.option(
    "--top-p", default=1.0, show_default=True, type=click.FloatRange(0, 1), help="Sampling top-p."
)
@click.option(
    "--min-p", default=0.0, show_default=True, type=click.FloatRange(0, 1), help="Sampling min-p."
)
@click.option(
    "--top-k", default=0, show_default=True, type=click.IntRange(min=0), help="Sampling top-k."
)
@click.option("--seed", type=int, help="Seed of the sampling.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option(
    "--logprobs",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --json: each token's log probability, and those of the N likeliest.",
)
@click.option(
    "--json-schema",
    type=click.File(encoding="utf-8"),
    help="The answer is JSON by the JSON Schema in this file.",
)
@click.option("--adapter-path", type=click.Path(path_type=Path), help="Folder of an adapter.")
@click.option("--kv-bits", type=int, help="Quantise the KV cache to this many bits.")
@click.option(
    "--kv-group-size",
    default=64,
    show_default=True,
    type=int,
    help="Group size of KV quantisation.",
)
@click.option(
    "--quantized-kv-start",
    default=0,
    show_default=True,
    type=int,
    help="Only 0: state quantised midway is not a function of its prefix.",
)
@click.option("--prefill-step-size", type=int, help="Prompt tokens of one forward pass.")
@click.option("--chat-template-config", metavar="JSON", help="Options of the chat template.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that the model brings along.")
@setting_option(
    "reuse",
    "--reuse",
    type=click.Choice(["max", "exact"]),
    help="max: equal up to rounding; exact: the bits of a cold exact run.",
)
@click.option(
    "--approximate",
    is_flag=True,
    help="Leave stored blocks whose state is gone out instead of computing them again: at most 5 % "
    "of what is stored of the prompt, never its first block or the last message.",
)
@click.option(
    "--measure-kl",
    is_flag=True,
    help="With --approximate: compute the exact answer's logits too, and say how far they are.",
)
@block_tokens_option
@max_memory_option
@click.option("--no-store", is_flag=True, help="Neither use the store nor feed it.")
@click.option("--stats", is_flag=True, help="The usage as JSON on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Events as JSON, one a line, on stdout.")
@store_option
def generate(**options: Any) -> None:
    """Generate text with an mlx-lm model and stream it to stdout.

    What was computed for a prompt, or for the beginning of one, is taken from the store instead of
    being computed again; what is computed is stored. A line on stderr says how much of the prompt
    was restored and computed. The option names are mlx-lm's.
    """
    _generate(**options)


def _generate(*, no_store: bool, stats: bool, as_json: bool, **options: Any) -> None:
    values = settings()
    from kvdb.identity import check_block_tokens

    check_block_tokens(values["block_tokens"])
    prompt = read_prompt(options["prompt"], options["messages_file"], options["tokens_file"])
    prompt["template_options"] = {
        **prompt.get("template_options", {}),
        **template_options(options["chat_template_config"]),
    }
    prepare_engine(values)
    from engine import Engine, EngineOptions, ModelOptions

    model_options = ModelOptions(
        adapter=options["adapter_path"],
        kv_bits=options["kv_bits"],
        kv_group_size=options["kv_group_size"],
        quantized_kv_start=options["quantized_kv_start"],
        trust_remote_code=options["trust_remote_code"],
    )
    engine_options = EngineOptions(
        block_tokens=values["block_tokens"],
        step=options["prefill_step_size"],
        max_memory=values["max_memory"],
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(spoken_log())
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _terminate))
        store = None if no_store else usable_store(values)
        if store is not None:
            stack.enter_context(store)
        engine = stack.enter_context(
            Engine(store, options["model"], model_options=model_options, options=engine_options)
        )
        events = engine.generate(_request(engine, prompt, options, values))
        end = _print_events(events) if as_json else _print_text(events)
    if stats:
        say(json.dumps(asdict(end.stats)))
    elif not as_json:
        say(usage_line(end.stats))


def usage_line(stats: Stats) -> str:
    """One line for people: what of the prompt was restored, refilled, masked and computed."""
    parts = [f"{stats.restored_tokens} restored"]
    if stats.refilled_tokens:
        parts.append(f"{stats.refilled_tokens} refilled")
    if stats.masked_tokens:
        kl = "" if stats.kl is None else f" (KL {stats.kl:.2g})"
        parts.append(f"{stats.masked_tokens} masked{kl}")
    parts.append(f"{stats.computed_tokens} computed ({stats.forwarded_prompt_tokens} forwarded)")
    first = "none" if stats.first_token_ms is None else f"after {stats.first_token_ms / 1e3:.2f} s"
    return (
        f"prompt: {stats.prompt_tokens} tokens, {', '.join(parts)}; first token {first}; "
        f"{stats.generated_tokens} generated in {stats.total_ms / 1e3:.1f} s; "
        f"model loaded in {stats.load_ms / 1e3:.1f} s"
        + (f"; {human_bytes(stats.bytes_read)} read" if stats.bytes_read else "")
        + (f"; {human_bytes(stats.bytes_remote)} from a remote" if stats.bytes_remote else "")
    )


def _terminate(_signal: int, _frame: object) -> None:
    """SIGTERM ends like an error does: what was computed is stored first."""
    sys.exit(TERMINATED)


def usable_store(values: Settings, *, ram: bool = False) -> Store | None:
    """The store, or what can be had of it: a store that is in the way of nobody's answer."""
    try:
        return open_store(values, create=True, ram=ram, remotes=True)
    except UsageError:
        raise
    except KvdbError as error:
        reason = str(error)
    try:
        # The engine says that nothing new is stored.
        return open_store(values, read_only=True, ram=ram, remotes=True)
    except KvdbError:
        say(f"Going on without the store: {reason}")
        return None


class _Speaker(logging.Handler):
    """What the engine logs is said on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"Note: {record.getMessage()}")
        if record.exc_info:
            say("".join(traceback.format_exception(*record.exc_info)).rstrip())


@contextlib.contextmanager
def spoken_log() -> Iterator[None]:
    logger, speaker = logging.getLogger("kvdb"), _Speaker(logging.WARNING)
    logger.addHandler(speaker)
    try:
        yield
    finally:
        logger.removeHandler(speaker)


def _request(
    engine: Engine, prompt: dict[str, Any], options: dict[str, Any], values: Settings
) -> Request:
    from engine import Guide, Request, Sampling

    schema = options["json_schema"]
    chat = as_chat(
        prompt,
        template=has_template(engine),
        raw=options["ignore_chat_template"],
        system=options["system_prompt"],
    )
    return Request(
        **chat,
        max_tokens=options["max_tokens"],
        stop=options["stop"],
        sampling=Sampling(
            temperature=options["temp"],
            top_p=options["top_p"],
            top_k=options["top_k"],
            min_p=options["min_p"],
            seed=options["seed"],
        ),
        logprobs=options["logprobs"],
        reuse=values["reuse"],
        approximate=options["approximate"],
        measure_kl=options["measure_kl"],
        guide=None if schema is None else Guide.schema(_read(schema)),
        client="kvdb generate",
    )


def _read(file: TextIO) -> str:
    try:
        return file.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"The JSON schema is not UTF-8 text: {error}.") from error


def has_template(engine: Engine) -> bool:
    """Whether the model has a chat template."""

    def ask(worker: Any) -> bool:
        return bool(getattr(worker.loaded.tokenizer, "has_chat_template", False))

    return engine.call(ask)


def _print_text(events: Iterator[Event]) -> End:
    from engine import End, Progress, Token

    first: object = None
    # The progress line is cleared before the first text.
    with progress("Prompt tokens") as report:
        for first in events:
            if not isinstance(first, Progress):
                break
            report(first.done, first.total)
    for event in itertools.chain([first], events):
        if isinstance(event, Token):
            click.echo(event.text, nl=False)
        elif isinstance(event, End):
            click.echo(event.text)
            return event
    raise RuntimeError("the engine gave no last event")


def _print_events(events: Iterator[Event]) -> End:
    from engine import End

    for event in events:
        document = {"event": type(event).__name__.lower(), **asdict(event)}
        click.echo(json.dumps(document, ensure_ascii=False))
        if isinstance(event, End):
            return event
    raise RuntimeError("the engine gave no last event")
