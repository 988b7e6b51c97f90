"""``kvdb serve``: models over HTTP, with state from the store."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvdb.cli.generate import spoken_log, usable_store
from kvdb.cli.options import (
    block_tokens_option,
    max_memory_option,
    prepare_engine,
    setting_option,
    settings,
    store_option,
)
from kvdb.cli.output import human_bytes, say
from kvdb.errors import ModelError

if TYPE_CHECKING:
    from engine.http.access import AccessOptions
    from engine.http.service import Drained, Served
    from engine.pool import PooledModel
    from kvdb.config import Settings, Value
    from kvdb.store import Store

DEFAULT_MODEL = "smollm2-135m"
# Those of engine.http.clients, which is not imported to show help.
CLIENTS = (
    *("claude-code", "codex", "opencode", "copilot", "cursor"),
    *("openai-python", "anthropic-python", "curl"),
)
PROBLEMS_FOUND = 3


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="Folder, hub id or built-in name of an mlx-lm model; repeatable. The first one is loaded "
    "at the start, others when they are asked for. Those of kvdb.toml are served, too.",
)
@setting_option("serve.host", "--host", metavar="ADDRESS", help="Listen here.  [127.0.0.1]")
@setting_option("serve.port", "--port", type=int, help="Listen here; 0 finds a port.  [8080]")
@setting_option(
    "serve.no_auth",
    "--no-auth",
    is_flag=True,
    default=None,
    help="No keys; on a loopback address only.",
)
@setting_option(
    "serve.allow_unauthenticated_inference",
    "--allow-unauthenticated-inference",
    is_flag=True,
    default=None,
    help="Everybody may ask models; administration still needs the key.",
)
@setting_option(
    "serve.max_tokens", "-m", "--max-tokens", type=int, help="Tokens of an answer, unless it says."
)
@setting_option("serve.temp", "--temp", type=float, help="Sampling temperature, unless it says.")
@setting_option("serve.top_p", "--top-p", type=float, help="Sampling top-p, unless it says.")
@setting_option("serve.top_k", "--top-k", type=int, help="Sampling top-k, unless it says.")
@setting_option("serve.min_p", "--min-p", type=float, help="Sampling min-p, unless it says.")
@setting_option("serve.max_running", "--max-running", type=int, help="Requests at work at once.")
@setting_option("serve.max_waiting", "--max-waiting", type=int, help="Requests that wait beside.")
@setting_option("serve.adapter_path", "--adapter-path", metavar="DIR", help="An adapter.")
@setting_option("serve.kv_bits", "--kv-bits", type=int, help="Quantise the KV cache.")
@setting_option("serve.kv_group_size", "--kv-group-size", type=int, help="Group size of that.")
@setting_option(
    "serve.prefill_step_size",
    "--prefill-step-size",
    type=int,
    help="Prompt tokens of one forward pass.",
)
@setting_option(
    "serve.trust_remote_code",
    "--trust-remote-code",
    is_flag=True,
    default=None,
    help="Run code that a model brings along.",
)
@setting_option(
    "serve.drain_seconds",
    "--drain-seconds",
    type=float,
    help="How long requests may go on after SIGTERM.",
)
@setting_option("ram", "--ram", metavar="SIZE", help="RAM for blocks in use: 2GB, or 20%.")
@setting_option(
    "reuse",
    "--reuse",
    type=click.Choice(["max", "exact"]),
    help="max: equal up to rounding; exact: the bits of a cold exact run.",
)
@block_tokens_option
@max_memory_option
@click.option("--no-store", is_flag=True, help="Neither use the store nor feed it.")
@click.option(
    "--client",
    type=click.Choice(CLIENTS),
    help="Print how this client is pointed at the server that would start, and start none.",
)
@store_option
def serve(models: tuple[str, ...], no_store: bool, client: str | None) -> None:
    """Serve models to clients of OpenAI's API and others.

    Set a client's base URL to the one that is shown. What was computed for a prompt, or for the
    beginning of one, is taken from the store. SIGTERM or ^C ends it: requests may finish, and what
    they computed is made durable; a second one ends it at once. Settings of kvdb.toml: the table
    [serve], and [models."NAME"] for one model.
    """
    values = settings()
    names = tuple(dict.fromkeys((*models, *values.models))) or (DEFAULT_MODEL,)
    if client is not None:
        _print_client(client, values, names[0])
        return
    from kvdb.identity import check_block_tokens

    check_block_tokens(values["block_tokens"])
    prepare_engine(values)
    _check_installed()
    _check_models(names)
    import uvicorn

    from engine.http.access import access_control
    from engine.http.app import ROUTERS, create_app
    from engine.http.connections import uvicorn_options
    from engine.http.levels import Rules
    from engine.http.lifecycle import Server, listen, url
    from engine.http.requestlog import request_lines
    from engine.http.service import Limits, Service
    from engine.pool import Pool, PoolOptions

    pooled = {name: _pooled(values.for_model(name)) for name in names}
    served = [_served(name, values.for_model(name)) for name in names]
    options = PoolOptions(
        max_models=values["serve.max_models"], max_memory=values["max_memory"], models=pooled
    )
    limits = Limits(
        max_waiting=values["serve.max_waiting"],
        max_messages=values["serve.max_messages"],
        max_tokens=values["serve.max_answer_tokens"],
        request_seconds=values["serve.request_seconds"],
        keep_alive_seconds=values["serve.keep_alive_seconds"],
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(spoken_log())
        stack.enter_context(request_lines(sys.stderr))
        store = None if no_store else usable_store(values, ram=True)
        if store is not None:
            stack.callback(store.close)
        access = _access(values)
        guard = access_control(access, store, Rules(ROUTERS))
        listening = stack.enter_context(listen(access.host, access.port))
        pool = stack.enter_context(Pool(store, options))
        service = Service(pool, store, served, limits)
        app = create_app(service, guard)
        config = uvicorn.Config(app, log_config=None, **uvicorn_options(access))
        first = [names[0], *(name for name in names[1:] if pooled[name].pinned)]
        server = Server(
            config, service, first, drain_seconds=values["serve.drain_seconds"], say=say
        )
        where = "without a store" if store is None else f"store {store.path}"
        say(f"kvdb serves {', '.join(names)} at {url(listening)}/v1 ({where})")
        server.run(sockets=[listening])
        if server.failure is not None:
            raise server.failure
        pool.close()
        durable = _make_durable(store, values["serve.drain_seconds"])
        say(_farewell(server.drained, store))
    if not durable:
        raise click.exceptions.Exit(PROBLEMS_FOUND)


def _print_client(client: str, values: Settings, model: str) -> None:
    """Print a client's configuration. A model's alias is what people call it. Raises UsageError."""
    from engine.http.clients import configuration, target

    aliases = values.for_model(model)["aliases"].value
    name = next((alias for alias in aliases if "*" not in alias), model)
    access = _access(values)
    to = target(access.host, access.port, access.allowed_hosts, name)
    click.echo(configuration(client, to), nl=False)


def _check_installed() -> None:
    import importlib.util

    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise ModelError("Serving needs fastapi and uvicorn, which are not installed.")


def _check_models(names: Sequence[str]) -> None:
    """Raise ModelError for the first model that is not here and cannot be fetched."""
    from engine.models import HUB_ID, find_local, resolve

    for name in names:
        if find_local(name) is None and not HUB_ID.fullmatch(name):
            resolve(name)


def _access(values: Settings) -> AccessOptions:
    """Who is let in. Raises UsageError."""
    from engine.http.access import AccessOptions

    names = (each.name for each in fields(AccessOptions))
    return AccessOptions(**{name: values[f"serve.{name}"] for name in names})


def _pooled(values: Mapping[str, Value]) -> PooledModel:
    """How the pool is to treat a model."""
    from engine import EngineOptions, ModelOptions
    from engine.pool import PooledModel

    adapter: Path | None = values["adapter_path"].value
    return PooledModel(
        ModelOptions(
            adapter=adapter,
            kv_bits=values["kv_bits"].value,
            kv_group_size=values["kv_group_size"].value,
            trust_remote_code=values["trust_remote_code"].value,
        ),
        EngineOptions(
            block_tokens=values["block_tokens"].value,
            step=values["prefill_step_size"].value,
            max_running=values["max_running"].value,
        ),
        ttl_seconds=values["unload_seconds"].value,
        pinned=values["pinned"].value,
    )


def _served(name: str, values: Mapping[str, Value]) -> Served:
    """What holds for requests to a model that say nothing else."""
    from engine.http.service import Served

    return Served(
        name,
        aliases=values["aliases"].value,
        max_tokens=values["max_tokens"].value,
        sampling={
            "temperature": values["temp"].value,
            "top_p": values["top_p"].value,
            "top_k": values["top_k"].value,
            "min_p": values["min_p"].value,
        },
        reuse=values["reuse"].value,
        max_running=values["max_running"].value,
    )


def _make_durable(store: Store | None, seconds: float) -> bool:
    """Wait for what is queued; what a stalled disk does not take in time is told, and given up."""
    if store is None or store.flush(seconds):
        return True
    puts, nbytes = store.unwritten()
    say(
        f"Not durable: {puts} puts of {human_bytes(nbytes)} that the disk did not take in "
        f"{seconds:g} s; their prompts are computed again."
    )
    os._exit(PROBLEMS_FOUND)  # closing the store would wait for that disk


def _farewell(drained: Drained | None, store: Store | None) -> str:
    durable = "" if store is None else "; what was stored is durable"
    if drained is None or not drained.finished + drained.parked:
        return f"Ended{durable}."
    return f"Ended: {drained.finished} requests finished, {drained.parked} parked{durable}."
