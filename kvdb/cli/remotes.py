"""``kvdb remotes``: where machines share blocks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import Format, human_bytes, output_options, say, table, write_json, write_rows

LIST = "SELECT name, url, options, reads, writes, budget_ms, created_at FROM remotes ORDER BY name"
STATUS = (
    "SELECT name, url, reads, writes, asked, found, got, got_bytes, put, put_bytes, present, "
    "rejected, failed, late, dropped, bytes_per_second, round_trip_ms, down_until, last_error, "
    "last_error_at FROM remotes ORDER BY name"
)
MAX_ROWS = 1_000_000
PROBLEMS_FOUND = 3
PASSPHRASE = "passphrase"  # noqa: S105 - a word of the command line


class Option(click.ParamType[tuple[str, str]]):
    """``KEY=VALUE``."""

    name = "option"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, rest = str(value).partition("=")
        if not equals:
            self.fail("An option is KEY=VALUE.", param, ctx)
        return key, rest


@click.group(invoke_without_command=True)
@click.pass_context
def remotes(ctx: click.Context) -> None:
    """Name the places where machines share state; without a command: list them.

    kvdb serve and kvdb generate look prompts up there and put there what they compute; kvdb push,
    pull and sync move what is stored. Secrets are in the environment, never in the store:
    KVDB_REMOTE_<NAME>_PASSWORD, _USERNAME, _ACCESS_KEY_ID, _SECRET_ACCESS_KEY, _SESSION_TOKEN,
    _ACCOUNT_KEY, _SAS_TOKEN, _PASSPHRASE, _IDENTITY (a file).
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_)


@remotes.command()
@click.argument("name")
@click.argument("url")
@click.option(
    "--option",
    "options",
    multiple=True,
    type=Option(),
    metavar="KEY=VALUE",
    help="What this kind of remote takes (docs/remotes.md), timeout=SECONDS, or salted=true to "
    "share namespaces of tenants of their own too; may be repeated.",
)
@click.option("--no-read", is_flag=True, help="Look no prompts up there.")
@click.option("--no-write", is_flag=True, help="Put nothing there.")
@click.option(
    "--budget-ms",
    type=int,
    metavar="N",
    help="Longest that a prompt's look-up waits for it (default 250).",
)
@click.option(
    "--encrypt",
    multiple=True,
    metavar="RECIPIENT|passphrase",
    help="Encrypt what goes there for an age recipient (age1… or ssh-…, may be repeated; reading "
    "needs KVDB_REMOTE_<NAME>_IDENTITY), or under KVDB_REMOTE_<NAME>_PASSPHRASE.",
)
@click.option("--no-check", is_flag=True, help="Do not try it first.")
@store_option
def add(
    name: str,
    url: str,
    options: tuple[tuple[str, str], ...],
    no_read: bool,
    no_write: bool,
    budget_ms: int | None,
    encrypt: tuple[str, ...],
    no_check: bool,
) -> None:
    """Add the remote at URL (s3://, gs://, az://, file://, redis://, rediss://, mooncake://) as
    NAME, after a small object went there and back."""
    given = dict(options)
    if len(given) < len(options):
        raise click.UsageError("An option is given twice.")
    if encrypt:
        given["encrypt"] = _encryption(encrypt)
    with open_store(create=True) as store:
        spec = store.add_remote(
            name,
            url,
            options=given,
            reads=not no_read,
            writes=not no_write,
            budget_ms=budget_ms,
            check=not no_check,
        )
    say(f"Added {spec.name}{'' if no_check else ': it works'}.")


def _encryption(encrypt: tuple[str, ...]) -> str:
    if PASSPHRASE not in encrypt:
        return json.dumps(list(encrypt))
    if len(encrypt) > 1:
        raise click.UsageError("--encrypt takes recipients or a passphrase, not both.")
    return PASSPHRASE


@remotes.command("list")
@output_options
@store_option
def list_(output: Format) -> None:
    """List all remotes."""
    with open_store(read_only=True) as store:
        result = store.sql(LIST, limit=MAX_ROWS)
    write_rows(result.columns, result.rows, output)


@remotes.command()
@click.argument("name")
@store_option
def remove(name: str) -> None:
    """Forget the remote NAME; what it holds stays there."""
    with open_store() as store:
        store.remove_remote(name)
    say(f"Removed {name}.")


@remotes.command()
@click.option("--json", "as_json", is_flag=True, help="A JSON array of objects.")
@store_option
def status(as_json: bool) -> None:
    """Say what each remote gave and took, how fast it is, and whether it works."""
    with open_store(read_only=True) as store:
        result = store.sql(STATUS, limit=MAX_ROWS)
        now = store.environment.now_us()
    rows = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
    for row in rows:
        row["state"] = "down" if (row["down_until"] or 0) > now else "up"
    if as_json:
        write_json(rows)
        return
    from kvdb.cli import terminal

    shown = [_status_row(row) for row in rows]
    headers = list(shown[0]) if shown else ["name", "state"]
    room = terminal.columns() if terminal.is_terminal() else None
    click.echo(table(headers, [list(row.values()) for row in shown], room=room))


def _status_row(row: dict[str, Any]) -> dict[str, Any]:
    speed, trip = row["bytes_per_second"], row["round_trip_ms"]
    return {
        "name": row["name"],
        "state": row["state"],
        **{name: row[name] for name in ("asked", "found", "got")},
        "got bytes": human_bytes(row["got_bytes"]),
        "put": row["put"],
        "put bytes": human_bytes(row["put_bytes"]),
        **{name: row[name] for name in ("present", "rejected", "failed", "late", "dropped")},
        "speed": "" if speed is None else f"{human_bytes(int(speed))}/s",
        "round trip": "" if trip is None else f"{trip:.1f} ms",
        "last error": row["last_error"] or "",
    }


@remotes.command()
@click.argument("remote", metavar="NAME|URL")
@click.option("--json", "as_json", is_flag=True, help="A JSON array of objects.")
@store_option
def check(remote: str, as_json: bool) -> None:
    """Try what the remote NAME is for, with one small object, and say how long each took.

    Exit code 3: something does not work.
    """
    with open_store() as store:
        steps = store.check_remote(remote)
    if as_json:
        write_json([dataclasses.asdict(step) for step in steps])
    else:
        for step in steps:
            say(f"{step.name:6} {step.ms:8.1f} ms  {step.problem or 'works'}")
    if any(step.problem is not None for step in steps):
        click.get_current_context().exit(PROBLEMS_FOUND)
