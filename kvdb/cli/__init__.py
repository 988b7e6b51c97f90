"""The ``kvdb`` program: one file a verb; each parses, calls and prints.

Errors become words here and nowhere else. Verbs are imported when they are called, and import
what is heavy when they run.
"""

from __future__ import annotations

import importlib
import keyword
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvdb.cli.options import store_option
from kvdb.errors import KvdbError

INTERRUPTED = 130

# Verb → the line that `kvdb --help` shows. The verb's module and command have its name (with an
# underscore where Python keeps the word for itself).
VERBS: Mapping[str, str] = {
    "compact": "Give dead bytes back and join small shards.",
    "demo": "Show on a small real model what the store saves.",
    "doctor": "Check this machine, the settings and the store.",
    "evict": "Remove blocks nobody holds until the store is small enough.",
    "explain": "Say how much of a prompt would hit, where it stops, and why.",
    "export": "Write stored state to a file for another machine.",
    "generate": "Generate text; prompts computed once are never computed again.",
    "import": "Take the state that a snapshot holds, every byte checked.",
    "info": "Show what the store holds and how large it is.",
    "keys": "Make, list and revoke the keys of those who may ask over HTTP.",
    "ls": "List blocks, shards, namespaces, sequences or requests.",
    "migrate": "Bring the store's schema up to date.",
    "models": "List models, or pull a small one.",
    "pin": "Keep a block and all before it from eviction.",
    "pull": "Take the state that a remote has and the store lacks.",
    "push": "Put state that a remote lacks there, for other machines.",
    "query": "Ask the store in SQL.",
    "quota": "Bound what a tenant or a namespace may have stored.",
    "rebuild": "Make the index anew from the shards.",
    "remotes": "Name the places where machines share state; see how they do.",
    "report": "Draw what the store holds and saves, as one HTML page.",
    "sequences": "Keep state under a name: save, list, show, fork, drop.",
    "serve": "Serve models over HTTP, as OpenAI's API and others have it.",
    "shell": "Ask the store at a prompt.",
    "simulate": "Replay a trace: what would hit at which size and policy.",
    "sync": "Push to a remote, then pull from it.",
    "unpin": "Let a pinned block go.",
    "verify": "Check that the store is what it should be; repair it.",
}


class Failure(click.ClickException):
    """An error in words, with its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        from kvdb.cli.terminal import visible

        super().__init__(visible(message))
        self.exit_code = exit_code  # type: ignore[misc]


class Program(click.Group):
    """Loads a verb's module when the verb is called, and turns errors into one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        module = importlib.import_module(f"kvdb.cli.{name}")
        command: click.Command = getattr(module, name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(VERBS.items()))

    def main(self, *args: Any, **options: Any) -> Any:
        _open_closed_streams()
        return super().main(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see kvdb/__main__.py
                signal.signal(signal.SIGINT, signal.default_int_handler)
            return super().invoke(ctx)
        except KvdbError as error:
            raise Failure(str(error), error.exit_code) from error
        except BrokenPipeError:
            raise  # click ends quietly when whoever read our output has gone
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise Failure(f"{error.strerror or error}{where}.", 1) from error
        except (KeyboardInterrupt, click.Abort) as error:
            raise Failure("Interrupted.", INTERRUPTED) from error


def _open_closed_streams() -> None:
    """Who starts the program may have closed them (``<&-``): then a file of the store could get
    their number, and what is said would be written into it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - it stays open
            setattr(sys, name, stream)


@click.command(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "-V", "--version", package_name="kvdb", message="%(prog)s %(version)s")
@store_option
def cli() -> None:
    """A database of KV cache state for local LLM inference.

    Data goes to stdout; talk, progress and errors go to stderr. Exit codes: 0 done, 1 error,
    2 wrong use, 3 finished and found problems, 10 no store, 11 locked, 12 store newer than this
    program, 13 integrity, 130 interrupted.
    """
