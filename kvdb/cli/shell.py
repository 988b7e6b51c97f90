"""``kvdb shell``: a prompt for SQL and for questions of this domain."""

from __future__ import annotations

import sys

import click

from kvdb.cli.options import open_store, store_option, timeout_option
from kvdb.cli.output import say


@click.command()
@click.option(
    "--mode",
    default="table",
    show_default=True,
    help="How rows are shown: table, lines, json, nl, csv, tsv, markdown, box.",
)
@click.option(
    "--limit",
    default=1000,
    show_default=True,
    type=click.IntRange(min=0),
    help="Show at most this many rows of a result.",
)
@timeout_option
@store_option
def shell(mode: str, limit: int, timeout: float) -> None:
    """Ask the store at a prompt, in SQL and with commands such as .miss and .savings.

    It can only read. A statement ends with ";"; .help lists the commands. From a pipe or a file it
    runs a script instead: no prompt, and the first error ends it with exit code 1.
    """
    from kvdb.cli import terminal
    from kvdb.cli.token_text import token_decoders
    from kvdb.sandbox import SandboxProcess
    from kvdb.shell.session import MODES, InterruptibleRunner, Session, write_out

    if mode not in MODES:
        raise click.UsageError(f"--mode {mode!r} is not one of {', '.join(MODES)}.")
    interactive = sys.stdin.isatty()
    with (
        open_store(read_only=True) as store,
        SandboxProcess(store.path, module="kvdb.shell.worker") as process,
    ):
        process.start()
        session = Session(
            store,
            InterruptibleRunner(process),
            write_out,
            say,
            token_decoders(store.path),
            room=lambda: terminal.columns() if terminal.is_terminal() else None,
            interactive=interactive,
            mode=mode,
            limit=limit,
            deadline=timeout,
        )
        if not interactive:
            from kvdb.shell.script import run_script

            run_script(session, sys.stdin)
            return
        import platformdirs
        import tabulate  # noqa: F401 - now: ^C must not cut it short later

        from kvdb.shell import repl
        from kvdb.shell.schema import LiveSchema

        if terminal.is_terminal():
            session.show = repl.page
        history = repl.open_history(platformdirs.user_state_path("kvdb") / "shell_history")
        prompt = repl.make_prompt(LiveSchema(store), history)
        say(f"{store.path}: .help lists commands, Ctrl-D leaves.")
        repl.interact(session, prompt)
