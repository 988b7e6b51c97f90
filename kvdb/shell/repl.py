"""The prompt: editing, history, completion, paging, and ^C that reaches the statement only."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.filters import Condition, completion_is_selected
from prompt_toolkit.formatted_text import AnyFormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.lexers import Lexer, PygmentsLexer
from prompt_toolkit.output import Output
from prompt_toolkit.shortcuts import CompleteStyle

from kvdb.cli import terminal
from kvdb.cli.output import say
from kvdb.errors import KvdbError
from kvdb.shell.completion import SqlCompleter
from kvdb.shell.schema import Schema
from kvdb.shell.session import Leave, Session, write_out
from kvdb.shell.split import Entry, cut, is_complete

PROMPT, MORE = "kvdb> ", "  ... "
# In a narrow terminal the prompt gives way to what is typed.
NARROW, NARROW_PROMPT, NARROW_MORE = 40, "> ", ". "


class PrivateHistory(FileHistory):
    """A history file for its owner only. Losing a line of it is no reason to stop."""

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def open_history(path: Path) -> History:
    """The history in ``path``, or one in memory where that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError:
        return InMemoryHistory()
    return PrivateHistory(path)


def make_prompt(
    schema: Callable[[], Schema],
    history: History,
    *,
    input: Input | None = None,
    output: Output | None = None,
) -> PromptSession[str]:
    """What reads one entry, of one line or many."""
    bindings = KeyBindings()

    @bindings.add("enter", filter=completion_is_selected)
    def take(event: KeyPressEvent) -> None:
        event.current_buffer.complete_state = None

    @bindings.add("c-c")
    @bindings.add("<sigint>")
    def give_up(event: KeyPressEvent) -> None:
        # One that comes while the prompt is ending is late, which prompt_toolkit calls a crash.
        if event.app.future is not None and not event.app.future.done():
            event.app.exit(exception=KeyboardInterrupt(), style="class:aborting")

    def more(width: int, _line: int, _wrapped: object) -> AnyFormattedText:
        return (NARROW_MORE if terminal.columns() < NARROW else MORE)[-width:]

    return PromptSession(
        lambda: NARROW_PROMPT if terminal.columns() < NARROW else PROMPT,
        multiline=Condition(lambda: not is_complete(get_app().current_buffer.text)),
        lexer=_lexer(),
        completer=SqlCompleter(schema),
        complete_while_typing=True,
        complete_style=CompleteStyle.COLUMN,
        history=history,
        key_bindings=bindings,
        prompt_continuation=more,
        reserve_space_for_menu=6,
        input=input,
        output=output,
    )


def _lexer() -> Lexer:
    from pygments.lexers.sql import SqlLexer

    return PygmentsLexer(SqlLexer)


def page(text: str) -> None:
    """To stdout, through a pager when it is longer than the terminal."""
    if text.count("\n") < shutil.get_terminal_size().lines:
        write_out(text)
        return
    # less: leave short pages alone, do not fold lines, keep the text on the screen.
    os.environ.setdefault("LESS", "-FSX")
    click.echo_via_pager(terminal.visible(text, keep="\n\t"), color=False)


class Interrupts:
    """^C while the shell is open: raised where something runs that it may end, and nowhere else.
    (At the prompt prompt_toolkit takes it.) For the main thread."""

    def __init__(self) -> None:
        self._armed = False

    def take_over(self) -> None:
        signal.signal(signal.SIGINT, self._note)

    def _note(self, *_: object) -> None:
        if self._armed:
            self._armed = False  # once: what cleans up behind it is not to be interrupted
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        try:
            self._armed = True
            yield
        finally:
            self._armed = False


def interact(session: Session, prompt: PromptSession[str]) -> None:
    """Read and run entries until the user leaves. ^C gives up the line, or ends the statement."""
    interrupts, before = Interrupts(), signal.getsignal(signal.SIGINT)
    try:
        while True:
            interrupts.take_over()  # each time: asyncio leaves another handler behind
            try:
                typed = prompt.prompt()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            try:
                with interrupts.raised():
                    for entry in entries(typed):
                        session.run(entry)
            except Leave:
                return
            except KeyboardInterrupt:
                say("Interrupted.")
            except KvdbError as error:
                click.secho(f"Error: {terminal.visible(str(error))}", err=True, fg="red")
    finally:
        signal.signal(signal.SIGINT, before)


def entries(typed: str) -> list[Entry]:
    """What was typed at one prompt: one command, or statements."""
    text = typed.strip()
    if text.startswith("."):
        return [Entry(text.rstrip(";").rstrip(), 1)]
    statements, rest, empty = cut(text)
    texts = [statement for statement, *_ in statements if statement]
    return [Entry(piece, 1) for piece in (texts if empty else [*texts, rest.strip()])]
