"""Options that several verbs share, and the settings and the store they lead to."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kvdb.config import Settings
    from kvdb.store import Store

Function = TypeVar("Function", bound=Callable[..., Any])
FLAGS = "kvdb.flags"


class Number(click.FloatRange):
    """A number in a range; NaN is none."""

    what = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a {self.what}.", param, ctx)
        return number


class Seconds(Number):
    """How long something may take: above 0, up to a day."""

    what = "number of seconds"

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=86_400)


class RowId(click.ParamType[int]):
    """The id of a namespace or a request."""

    name = "id"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        text = str(value)
        if not (text.isascii() and text.isdecimal() and len(text) < 19):
            self.fail(f"{text!r} is not an id: a whole number.", param, ctx)
        return int(text)


def setting_option(
    key: str, *declarations: str, **attributes: Any
) -> Callable[[Function], Function]:
    """An option that overrides the setting ``key``; the verb reads it through :func:`settings`."""

    def remember(ctx: click.Context, _parameter: click.Parameter, value: object) -> None:
        if value is not None:
            ctx.meta.setdefault(FLAGS, {})[key] = value

    return click.option(*declarations, callback=remember, expose_value=False, **attributes)


def store_option(function: Function) -> Function:
    """``--store DIR``, before the verb or after it."""
    return setting_option(
        "store", "--store", metavar="DIR", help="Folder of the store (or KVDB_STORE)."
    )(function)


def max_memory_option(function: Function) -> Function:
    """``--max-memory``: what the engine's process may hold."""
    return setting_option(
        "max_memory",
        "--max-memory",
        metavar="SIZE",
        help="Most memory of the process: 8GB, or 50% of the machine's. Longer prefills go in "
        "shorter steps; what cannot fit is refused.",
    )(function)


def block_tokens_option(function: Function) -> Function:
    """``--block-tokens N``."""
    return setting_option(
        "block_tokens",
        "--block-tokens",
        type=int,
        metavar="N",
        help="Tokens of one block: a power of two, 16 to 4096.",
    )(function)


def timeout_option(function: Function) -> Function:
    """``--timeout SECONDS`` of a statement."""
    return click.option(
        "--timeout",
        default=10.0,
        show_default=True,
        type=Seconds(),
        metavar="SECONDS",
        help="Stop a statement after this time.",
    )(function)


def settings() -> Settings:
    """All settings, with the flags given so far on top. Raises UsageError."""
    from kvdb import config

    return config.load(click.get_current_context().meta.get(FLAGS))


def open_store(
    values: Settings | None = None,
    *,
    read_only: bool = False,
    create: bool = False,
    ram: bool = False,
    remotes: bool = False,
) -> Store:
    """Open the store that the settings name, with its RAM tier if ``ram``: of use to a process that
    answers more than one request. With ``remotes`` prompts are looked up there too, and what is
    stored goes there. Raises what :func:`kvdb.open` raises."""
    import kvdb

    values = values or settings()
    return kvdb.open(
        values["store"],
        create=create,
        read_only=read_only,
        max_bytes=values["max_bytes"],
        min_free_bytes=values["min_free_bytes"],
        durability=values["durability"],
        codec=values["codec"],
        queue_bytes=values["queue_bytes"],
        ram=values["ram"] if ram else 0,
        read_workers=values["read_workers"],
        read_ahead=values["read_ahead"],
        history_requests=values["history_requests"],
        history_evictions=values["history_evictions"],
        history_hours=values["history_hours"],
        program="kvdb " + (click.get_current_context().info_name or ""),
        remotes=remotes,
    )


def prepare_engine(values: Settings) -> None:
    """Make this process ready for the engine: its folders, and quiet libraries. Raises ModelError
    where MLX is not installed."""
    import importlib.util

    from kvdb.errors import ModelError

    if any(importlib.util.find_spec(name) is None for name in ("mlx", "mlx_lm")):
        raise ModelError(
            "Generating needs mlx and mlx-lm, which are not installed; kvdb doctor says more."
        )
    prepare_tokenizers(values)


def prepare_tokenizers(values: Settings) -> None:
    """Make this process ready to find models and read their tokenizers, without MLX."""
    # The engine reads these itself; a folder named in kvdb.toml must reach it too.
    os.environ["KVDB_MODELS"] = str(values["models"])
    os.environ["KVDB_CACHE"] = str(values["cache"])
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
