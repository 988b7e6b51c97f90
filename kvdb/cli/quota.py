"""``kvdb quota``: bound what a tenant or a namespace may have stored."""

from __future__ import annotations

import click

from kvdb.cli.evict import Size
from kvdb.cli.options import open_store, store_option
from kvdb.cli.output import Format, output_options, say, write_rows
from kvdb.errors import StoreMissing

# Namespaces that a bound is set for, or a tenant's together, and what they hold now.
LIST = """
SELECT 'tenant' AS kind, substr(s.key, length('quota.tenant.') + 1) AS name,
    CAST(s.value AS INTEGER) AS quota_bytes,
    (SELECT coalesce(sum(n.live_bytes), 0) FROM namespaces AS n
        WHERE n.tenant = substr(s.key, length('quota.tenant.') + 1)) AS live_bytes
FROM settings AS s WHERE s.key LIKE 'quota.tenant.%'
UNION ALL
SELECT 'namespace', CAST(n.id AS TEXT), CAST(s.value AS INTEGER), n.live_bytes
FROM settings AS s JOIN namespaces AS n ON s.key = 'quota.namespace.' || lower(hex(n.fingerprint))
"""


@click.command()
@click.option("--tenant", metavar="NAME", help="All namespaces of this tenant together.")
@click.option(
    "--namespace", "namespace_id", type=int, metavar="ID", help="One (see kvdb ls namespaces)."
)
@click.option("--set", "nbytes", type=Size(), metavar="SIZE", help="The bound, such as 10GB.")
@click.option("--lift", is_flag=True, help="Take the bound away.")
@output_options
@store_option
def quota(
    tenant: str | None, namespace_id: int | None, nbytes: int | None, lift: bool, output: Format
) -> None:
    """List quotas with what is stored under them, or set or lift one.

    A put that would go beyond a quota evicts blocks of the same tenant or namespace first, and
    is dropped when that does not make room.
    """
    if tenant is None and namespace_id is None:
        if nbytes is not None or lift:
            raise click.UsageError("Say whose quota: --tenant NAME or --namespace ID.")
        with open_store(read_only=True) as store:
            result = store.sql(LIST, limit=1_000_000)
        write_rows(result.columns, result.rows, output)
        return
    if tenant is not None and namespace_id is not None:
        raise click.UsageError("Give --tenant or --namespace, not both.")
    if (nbytes is None) != lift:
        raise click.UsageError("Give either --set SIZE or --lift.")
    with open_store() as store:
        namespace = None
        if namespace_id is not None:
            namespace = next((n for n in store.namespaces() if n.id == namespace_id), None)
            if namespace is None:
                raise StoreMissing(f"There is no namespace {namespace_id}; see kvdb ls namespaces.")
        store.set_quota(nbytes, namespace=namespace, tenant=tenant or "")
    say("The quota is lifted." if lift else f"The quota is {nbytes} bytes.")
