"""``kvdb keys``: who may ask over HTTP."""

from __future__ import annotations

import click

from kvdb.cli.options import RowId, open_store, store_option
from kvdb.cli.output import Format, output_options, say, write_rows

LIST = (
    "SELECT id, role, tenant, name, role = 'tenant' AND length(cache_salt) = 0 AS shared, "
    "created_at, last_used_at, revoked_at FROM keys ORDER BY id"
)
MAX_ROWS = 1_000_000


@click.group(invoke_without_command=True)
@click.pass_context
def keys(ctx: click.Context) -> None:
    """Make, list and revoke keys; without a command: list them.

    Without any key a server answers this machine only. As soon as there is one, every request needs
    one. A running server heeds changes at once.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_)


@keys.command()
@click.argument("role", type=click.Choice(["main", "admin", "tenant"]))
@click.option("--tenant", default="", metavar="NAME", help="Whose key a tenant's key is.")
@click.option("--name", default="", help="What to call it in lists.")
@click.option(
    "--shared", is_flag=True, help="Let the tenant share blocks with everybody who has no salt."
)
@store_option
def create(role: str, tenant: str, name: str, shared: bool) -> None:
    """Make a key and print it, once: it is kept nowhere.

    main asks models and sees the overview; admin may do everything; tenant asks models on behalf of
    --tenant NAME, whose blocks no other tenant can see or hit.
    """
    from kvdb.keys import ROLES, create_key

    with open_store(create=True) as store:
        new = create_key(
            store,
            next(known for known in ROLES if known == role),
            tenant=tenant,
            name=name,
            shared=shared,
        )
    say(f"Key {new.key.id}; it is not shown again.")
    click.echo(new.text)


@keys.command("list")
@output_options
@store_option
def list_(output: Format) -> None:
    """List all keys, revoked ones too; none is shown itself."""
    with open_store(read_only=True) as store:
        result = store.sql(LIST, limit=MAX_ROWS)
    write_rows(result.columns, result.rows, output)


@keys.command()
@click.argument("key_id", metavar="ID", type=RowId())
@store_option
def revoke(key_id: int) -> None:
    """End the key ID for good, also in servers that run."""
    from kvdb.keys import revoke_key

    with open_store() as store:
        revoke_key(store, key_id)
    say(f"Key {key_id} is revoked.")
