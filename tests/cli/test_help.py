"""Every verb explains itself, is in the README, and loads no more than it needs."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvdb.cli import VERBS, cli
from kvdb.config import SETTINGS
from tests.cli.conftest import ROOT, Run

HEAVY = {"mlx", "mlx_lm", "transformers", "torch", "sqlite_utils"}
HELP_SECONDS = 0.2


def commands(group: click.Group, name: str = "") -> list[tuple[str, click.Command]]:
    context = click.Context(group)
    found = []
    for verb in group.list_commands(context):
        command = group.get_command(context, verb)
        assert command is not None
        found.append((f"{name} {verb}".strip(), command))
        if isinstance(command, click.Group):
            found += commands(command, verb)
    return found


COMMANDS = dict(commands(cli))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_and_each_of_its_options_has_help(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    assert command.help.strip().endswith((".", "hex."))
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"kvdb {name} {parameter.opts}"


README = (ROOT / "README.md").read_text("utf-8")


def test_help_and_readme_name_every_view(run: Run, filled: Path) -> None:
    sql = "SELECT name FROM sqlite_schema WHERE type = 'view'"
    views = set(run("query", "--raw-lines", sql).stdout.split())
    told = str(COMMANDS["query"].help)
    assert len(views) >= 12
    assert views <= set(re.findall(r"\w+", told))
    assert views <= set(re.findall(r"`(\w+)`", README))


@pytest.mark.parametrize("sql", re.findall(r"^kvdb query -t '(.+)'$", README, re.MULTILINE))
def test_the_readmes_queries_work(run: Run, filled: Path, sql: str) -> None:
    assert run("query", "-t", sql).returncode == 0


def test_the_readmes_python_works(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.+?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code.replace('"smollm2-135m"', repr(str(tiny))), {})
    assert "[('none', 0)]" in capsys.readouterr().out


def test_the_readme_names_every_setting() -> None:
    for key in SETTINGS:
        assert f"| `{key}` |" in README


@pytest.mark.parametrize("verb", VERBS)
def test_the_readme_shows_the_verb(verb: str) -> None:
    assert f"kvdb {verb}" in README


def test_the_store_can_be_named_before_and_after_the_verb(run: Run, tmp_path: Path) -> None:
    for arguments in (("--store", tmp_path / "a", "info"), ("info", "--store", tmp_path / "a")):
        done = run(*arguments)
        assert (done.returncode, str(tmp_path / "a") in done.stderr) == (10, True)
    both = run("--store", tmp_path / "a", "info", "--store", tmp_path / "b")
    assert str(tmp_path / "b") in both.stderr


def test_version(spawn: Run) -> None:
    import kvdb

    assert spawn("--version").stdout == f"kvdb {kvdb.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["query", "SELECT 1"],
        ["generate", "--help"],
        ["ls", "blocks"],
        ["info"],
        ["verify"],
    ],
)
def test_nothing_heavy_is_loaded(
    environment: dict[str, str], filled: Path, arguments: list[str]
) -> None:
    code = (
        "import atexit, sys; from kvdb.cli import cli\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        f"cli({arguments!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(done.stderr.split())
    if "--help" in arguments:
        assert "numpy" not in done.stderr.split()


def test_help_is_quick(environment: dict[str, str]) -> None:
    """In processor time, the best of five: the machine may be busy."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    for _ in range(5):
        before = used()
        subprocess.run(
            [sys.executable, "-m", "kvdb", "--help"],
            env=environment,
            check=True,
            capture_output=True,
        )
        times.append(used() - before)
    assert min(times) < HELP_SECONDS
