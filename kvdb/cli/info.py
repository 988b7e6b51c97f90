"""``kvdb info``: what the store holds and how large it is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from kvdb.cli.options import open_store, settings, store_option
from kvdb.cli.output import human_bytes, table, write_json

if TYPE_CHECKING:
    from kvdb.config import Settings
    from kvdb.info import StoreInfo


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@store_option
def info(as_json: bool) -> None:
    """Show sizes, the limit, namespaces, blocks, leftovers and settings of the store."""
    values = settings()
    with open_store(values, read_only=True) as store:
        found = store.info()
    if as_json:
        write_json({**dataclasses.asdict(found), "options": setting_rows(values)})
        return
    click.echo(table((), _lines(found), "plain"))
    if found.namespaces:
        click.echo()
        click.echo(
            table(
                (
                    "namespace",
                    "model",
                    "block tokens",
                    "blocks",
                    "tokens",
                    "bytes",
                    "bytes a token",
                ),
                [
                    (
                        n.id,
                        n.model,
                        n.block_tokens,
                        n.live_blocks,
                        n.live_tokens,
                        human_bytes(n.live_bytes),
                        "" if n.bytes_per_token is None else human_bytes(n.bytes_per_token),
                    )
                    for n in found.namespaces
                ],
            )
        )
    click.echo()
    click.echo(
        table(("setting", "value", "origin"), [tuple(row.values()) for row in setting_rows(values)])
    )


def setting_rows(values: Settings) -> list[dict[str, Any]]:
    """Every setting with its value and where it came from, then what models have of their own."""
    rows = [
        {"setting": key, "value": _plain(value.value), "origin": value.origin}
        for key, value in values.all.items()
    ]
    for name, section in values.models.items():
        effective = values.for_model(name)
        rows += [
            {
                "setting": f'models."{name}".{key}',
                "value": _plain(effective[key].value),
                "origin": effective[key].origin,
            }
            for key in section
        ]
    return rows


def _lines(found: StoreInfo) -> list[tuple[str, str]]:
    lines = [
        ("store", found.path),
        ("size", f"{human_bytes(found.bytes)} of at most {human_bytes(found.max_bytes)}"),
        (
            "disk",
            f"{human_bytes(found.free_bytes)} free, of which "
            f"{human_bytes(found.min_free_bytes)} stay free",
        ),
        (
            "blocks",
            f"{found.live_blocks} live, {found.held_holes} held without their bytes, "
            f"{found.remembered_blocks} remembered",
        ),
        ("shards", f"{found.shards} files, {human_bytes(found.shard_bytes)}"),
        ("history", f"{found.requests} requests, {found.evictions} evictions"),
        (
            "restored",
            f"{human_bytes(found.bytes_read)} from shards, "
            f"{human_bytes(found.bytes_ram)} from RAM, by all requests",
        ),
        ("sequences", str(found.sequences)),
        ("processes", str(found.processes)),
        ("leftovers", f"{found.leftovers} of dead processes"),
        ("schema", f"{found.user_version}, SQLite {found.sqlite_version}"),
    ]
    if found.wal_reset_bug:
        lines.append(("warning", "this SQLite has the WAL-reset bug; see kvdb doctor"))
    return lines


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else str(value)
