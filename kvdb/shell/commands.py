"""The shell's dot-commands: those that any SQL shell has, and the registry of all."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvdb import functions
from kvdb.shell import domain
from kvdb.shell.schema import LiveSchema
from kvdb.shell.session import MODES, Leave, Session, ShellError

FIND_SCHEMA = """
    SELECT sql FROM sqlite_schema
    WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite%'
        AND (:name IS NULL OR lower(name) = lower(:name) OR lower(tbl_name) = lower(:name))
    ORDER BY type <> 'table', type, name
"""


@dataclass(frozen=True, slots=True)
class Command:
    """``arguments`` as help shows them: in brackets what may be left out."""

    arguments: str
    help: str
    run: Callable[[Session, list[str]], None]

    @property
    def most(self) -> int:
        return len(self.arguments.split())

    @property
    def least(self) -> int:
        return sum(not word.startswith("[") for word in self.arguments.split())


def run_command(session: Session, line: str) -> None:
    """Run a line that begins with a dot. Raises ShellError for a wrong one."""
    try:
        name, *arguments = shlex.split(line)
    except ValueError as error:
        raise ShellError(f"{line.split()[0]}: {str(error).lower()}.") from error
    command = COMMANDS.get(name.lower())
    if command is None:
        near = difflib.get_close_matches(name.lower(), COMMANDS, 1)
        hint = f"did you mean {near[0]}? See .help." if near else "see .help."
        raise ShellError(f"There is no command {name}; {hint}")
    if not command.least <= len(arguments) <= command.most:
        raise ShellError(f"It is used so: {name} {command.arguments}".rstrip() + ".")
    command.run(session, arguments)


def _help(session: Session, arguments: list[str]) -> None:
    chosen = COMMANDS
    if arguments:
        name = "." + arguments[0].lower().lstrip(".")
        if name not in COMMANDS:
            raise ShellError(f"There is no command {name}; see .help.")
        chosen = {name: COMMANDS[name]}
    lines = [(f"{name} {command.arguments}", command.help) for name, command in chosen.items()]
    lines = [(usage.rstrip(), text) for usage, text in lines]
    if not arguments:
        lines += [("", ""), *functions.DOCUMENTED.items()]
    room = session.room()
    wide = max(len(usage) for usage, _ in lines) + 2
    if room is not None and room < wide + 20:
        session.show_text("\n".join(f"{usage}\n  {text}" for usage, text in lines if usage))
        return
    head = () if arguments else ("A statement ends with ; and may have many lines.", "")
    session.show_text("\n".join([*head, *(f"{u:<{wide}}{t}".rstrip() for u, t in lines)]))


def _tables(session: Session, arguments: list[str]) -> None:
    rows = [(t.name, t.kind, t.meaning) for t in LiveSchema(session.store)().tables.values()]
    session.show_rows(("name", "kind", "meaning"), rows)


def _schema(session: Session, arguments: list[str]) -> None:
    name = arguments[0] if arguments else None
    result = session.ask(FIND_SCHEMA, {"name": name})
    if not result.rows:
        raise ShellError(f"There is no table or view {name}; .tables lists them.")
    session.show_text("\n".join(f"{sql};" for (sql,) in result.rows))


def _mode(session: Session, arguments: list[str]) -> None:
    if not arguments:
        session.say(f"The mode is {session.mode}; there are {', '.join(MODES)}.")
    elif arguments[0] in MODES:
        session.mode = arguments[0]
    else:
        raise ShellError(f"{arguments[0]!r} is not one of {', '.join(MODES)}.")


def _timer(session: Session, arguments: list[str]) -> None:
    if arguments and arguments[0] not in ("on", "off"):
        raise ShellError(f"The timer is on or off, not {arguments[0]!r}.")
    session.timer = arguments[0] == "on" if arguments else not session.timer
    session.say(f"The timer is {'on' if session.timer else 'off'}.")


def _once(session: Session, arguments: list[str]) -> None:
    session.once = Path(arguments[0]).expanduser()


def _limit(session: Session, arguments: list[str]) -> None:
    if arguments:
        session.limit = domain.whole_number(arguments[0], "the number of rows")
    session.say(f"At most {session.limit} rows are shown.")


def _timeout(session: Session, arguments: list[str]) -> None:
    if arguments:
        try:
            seconds = float(arguments[0])
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= 86_400:
            raise ShellError(f"{arguments[0]!r} is not a number of seconds above 0.")
        session.deadline = seconds
    session.say(f"A statement is stopped after {session.deadline:g} s.")


def _quit(_session: Session, _arguments: list[str]) -> None:
    raise Leave


COMMANDS: Mapping[str, Command] = {
    ".hits": Command("[N]", "the latest requests: what was restored, what computed", domain.hits),
    ".top": Command("[N]", "the blocks that were used most", domain.top),
    ".tree": Command("[PREFIX]", "prompts as a tree, whole or from a block on", domain.tree),
    ".miss": Command("[REQUEST]", "the costliest recent misses, or why one missed", domain.miss),
    ".savings": Command("", "tokens and seconds saved, by model", domain.savings),
    ".wear": Command("", "bytes written to the disk, by day", domain.wear),
    ".capacity": Command("", "what is stored, by model, and the room left", domain.capacity),
    ".block": Command("HASH", "a block by its hash, or the beginning of it", domain.block),
    ".tables": Command("", "tables and views", _tables),
    ".schema": Command("[NAME]", "the SQL that made them", _schema),
    ".mode": Command("[MODE]", f"how rows are shown: {', '.join(MODES)}", _mode),
    ".limit": Command("[N]", "how many rows are shown at most", _limit),
    ".timeout": Command("[SECONDS]", "when a statement is stopped", _timeout),
    ".timer": Command("[on|off]", "how long statements take", _timer),
    ".once": Command("FILE", "write the next result to a new file", _once),
    ".help": Command("[COMMAND]", "this list", _help),
    ".quit": Command("", "leave; so do .exit and Ctrl-D", _quit),
    ".exit": Command("", "leave", _quit),
}
