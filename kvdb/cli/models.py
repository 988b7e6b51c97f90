"""``kvdb models``: the small models that kvdb can pull by itself."""

from __future__ import annotations

import click

from kvdb.cli.options import settings, store_option
from kvdb.cli.output import Format, human_bytes, output_options, say, write_rows


@click.group(invoke_without_command=True)
@store_option
@click.pass_context
def models(ctx: click.Context) -> None:
    """List models, or pull a small one.

    Without a command: list. Other models are given to generate as a folder or a hub id.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_models)


@models.command("list")
@output_options
def list_models(output: Format) -> None:
    """List the built-in models and the models in the models folder."""
    from engine.pull import BUILT_IN

    folder = settings()["models"]
    here = (
        {path.name for path in folder.iterdir() if (path / "config.json").exists()}
        if folder.is_dir()
        else set()
    )
    rows = [
        (
            name,
            str(folder / name) if name in here else None,
            BUILT_IN[name].license if name in BUILT_IN else None,
            BUILT_IN[name].download_nbytes if name in BUILT_IN else None,
        )
        for name in sorted(here | set(BUILT_IN))
    ]
    write_rows(("name", "folder", "license", "download_nbytes"), rows, output)


@models.command()
@click.argument("name")
def pull(name: str) -> None:
    """Fetch the built-in model NAME and convert it; its folder is printed.

    Nothing is done when it is here already. An interrupted pull leaves no half model.
    """
    click.echo(pull_model(name))


def pull_model(name: str) -> str:
    """Pull with progress on stderr; the folder it is in. Raises ModelError."""
    from engine.pull import BUILT_IN, pull

    folder = settings()["models"]
    if name in BUILT_IN and not (folder / name).is_dir():
        say(
            f"Pulling {name} ({human_bytes(BUILT_IN[name].download_nbytes)}, "
            f"{BUILT_IN[name].license}) into {folder}."
        )
    last = ""

    def report(stage: str, seconds: float) -> None:
        nonlocal last
        if stage != last or (int(seconds) % 5 == 0 and seconds >= 5):
            say(f"  {stage}" + (f": {seconds:.0f} s" if seconds >= 1 else ""))
        last = stage

    return str(pull(name, report, folder))
