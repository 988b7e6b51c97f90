"""The remotes that a store knows: rows of ``remotes``, and secrets from the environment.

Neither a row nor a URL holds a secret: stores are copied, backed up and queried in SQL.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvdb.config import REMOTE_SECRETS, secret_variable
from kvdb.errors import (
    OutOfSpace,
    StoreLocked,
    StoreMissing,
    StoreReadOnly,
    StoreUnavailable,
    UsageError,
)
from kvdb.remotes.registry import SCHEMES
from kvdb.remotes.remote import RemoteConfig

if TYPE_CHECKING:
    from kvdb.driver import Connection
    from kvdb.store import Store

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
URL = re.compile(r"([a-z0-9]+)://(\S+)")
OPTION = re.compile(r"[a-z][a-z0-9_]{0,39}")
MAX_TEXT = 2000
MAX_ERROR = 500
DEFAULT_BUDGET_MS = 250
MAX_BUDGET_MS = 600_000
COLUMNS = "id, name, url, options, reads, writes, budget_ms"
LIST = f"SELECT {COLUMNS} FROM remotes ORDER BY name"  # noqa: S608 - a constant
FIND = f"SELECT {COLUMNS} FROM remotes WHERE name = ?"  # noqa: S608 - a constant
INSERT = (
    "INSERT INTO remotes (name, url, options, reads, writes, budget_ms, created_at) "
    "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO NOTHING RETURNING id"
)
# Added to, not set: several processes count in one row.
COUNT = (
    "UPDATE remotes SET got = got + ?, got_bytes = got_bytes + ?, put = put + ?, "
    "put_bytes = put_bytes + ?, present = present + ?, rejected = rejected + ?, "
    "failed = failed + ?, last_error = coalesce(?, last_error), "
    "last_error_at = iif(? IS NULL, last_error_at, ?) WHERE id = ?"
)
DELETE = "DELETE FROM remotes WHERE name = ? RETURNING id"


@dataclass(frozen=True, slots=True)
class RemoteSpec:
    """One remote, whether prompts are looked up there (``reads``) and what is stored here goes
    there (``writes``). ``id`` is that of its row; 0 for one that is in no table."""

    id: int
    config: RemoteConfig
    reads: bool = True
    writes: bool = True
    budget_ms: int = DEFAULT_BUDGET_MS

    @property
    def name(self) -> str:
        return self.config.name


def load_specs(
    connection: Connection, environment: Mapping[str, str] = os.environ
) -> list[RemoteSpec]:
    """All remotes, by name, with the secrets that ``environment`` has for them."""
    return [_spec(environment, *row) for row in connection.execute(LIST)]


def find_spec(
    connection: Connection, name: str, environment: Mapping[str, str] = os.environ
) -> RemoteSpec:
    """Raises StoreMissing where there is no remote of this name."""
    row = connection.execute(FIND, (name,)).fetchone()
    if row is None:
        raise _no_remote(name)
    return _spec(environment, *row)


def named_or_at(
    connection: Connection, text: str, environment: Mapping[str, str] = os.environ
) -> RemoteSpec:
    """The remote of a name; or, for a URL, the one that is saved with it, or one that is in no
    table and has its scheme for a name. Raises StoreMissing, UsageError."""
    if "://" not in text:
        return find_spec(connection, text, environment)
    name = text.partition("://")[0]
    check_url(name, text)
    saved = [spec for spec in load_specs(connection, environment) if spec.config.url == text]
    return saved[0] if saved else new_spec(name, text, environment=environment)


def new_spec(
    name: str,
    url: str,
    *,
    options: Mapping[str, str] | None = None,
    reads: bool = True,
    writes: bool = True,
    budget_ms: int = DEFAULT_BUDGET_MS,
    environment: Mapping[str, str] = os.environ,
) -> RemoteSpec:
    """A remote that is not saved yet. Raises UsageError for a name, URL or option that is none, or
    holds a secret."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r:.80} is no name for a remote: a to z, 0 to 9 and -, at most 40 of them."
        )
    check_url(name, url)
    if not 0 < budget_ms <= MAX_BUDGET_MS:
        raise UsageError(f"A remote's budget is 1 to {MAX_BUDGET_MS} ms.")
    if not (reads or writes):
        raise UsageError("A remote that is neither read nor written is of no use.")
    for key, value in (options or {}).items():
        _check_option(name, key, value)
    config = RemoteConfig(name, url, dict(options or {}), _secrets(name, environment))
    return RemoteSpec(0, config, reads, writes, budget_ms)


def save_spec(store: Store, spec: RemoteSpec) -> RemoteSpec:
    """Insert the row, and give it with its id. Raises UsageError where the name is taken."""
    store.require_writable()
    config = spec.config
    with store.database.write() as connection:
        row = connection.execute(
            INSERT,
            (
                config.name,
                config.url,
                json.dumps(config.options, sort_keys=True),
                int(spec.reads),
                int(spec.writes),
                spec.budget_ms,
                store.environment.now_us(),
            ),
        ).fetchone()
    if row is None:
        raise UsageError(f"There is a remote {config.name!r} already; remove it first.")
    return replace(spec, id=row[0])


def remove_spec(store: Store, name: str) -> None:
    """Forget a remote; what it holds stays there. Raises StoreMissing."""
    store.require_writable()
    with store.database.write() as connection:
        row = connection.execute(DELETE, (name,)).fetchone()
    if row is None:
        raise _no_remote(name)


def count_transfer(
    store: Store,
    spec: RemoteSpec,
    *,
    got: tuple[int, int] = (0, 0),
    put: tuple[int, int] = (0, 0),
    present: int = 0,
    rejected: int = 0,
    failed: int = 0,
    error: str = "",
) -> None:
    """Add what a push or a pull came to to the remote's row: objects (and their bytes). A store
    that cannot be written now does without."""
    message = error[:MAX_ERROR] or None
    now = store.environment.now_us()
    values = (*got, *put, present, rejected, failed, message, message, now, spec.id)
    unwritable = contextlib.suppress(StoreLocked, OutOfSpace, StoreUnavailable, StoreReadOnly)
    with unwritable, store.database.write() as connection:
        connection.execute(COUNT, values)


def check_url(name: str, url: str) -> None:
    """Raises UsageError, which never shows the URL where that may hold a secret."""
    found = URL.fullmatch(url)
    if found is None or len(url) > MAX_TEXT:
        raise UsageError("A remote's URL is SCHEME://PLACE, without spaces.")
    scheme, place = found[1], found[2]
    who, at, _ = place.rpartition("@")
    if at and ":" in who and (scheme != "file" or not place.startswith("/")):
        raise UsageError(
            "A URL is stored and shown, so it holds no password: set "
            f"{secret_variable(name, 'password')}, and write the URL without it."
        )
    if scheme not in SCHEMES:
        raise UsageError(
            f"{scheme}:// is no remote; its URL begins with one of "
            f"{', '.join(f'{known}://' for known in SCHEMES)}."
        )
    if scheme != "file" and ("?" in place or "#" in place):
        raise UsageError("A remote's URL ends with its path; give --option KEY=VALUE for the rest.")


def _check_option(name: str, key: str, value: str) -> None:
    if not OPTION.fullmatch(key) or not value or len(value) > MAX_TEXT or not value.isprintable():
        raise UsageError(f"{key!r:.80} is no option with a value: KEY=VALUE.")
    secret = next((what for what in REMOTE_SECRETS if _means(key, what)), None)
    if secret is not None:
        raise UsageError(
            f"Options are stored and shown, so none is {key}: set {secret_variable(name, secret)}."
        )


def _means(key: str, what: str) -> bool:
    """True when an option of this name would hold that secret."""
    plain, secret = key.replace("_", ""), what.replace("_", "")
    return plain == secret if secret in ("identity", "username") else secret in plain


def _no_remote(name: str) -> StoreMissing:
    return StoreMissing(f"There is no remote {name!r:.80}; see kvdb remotes list.")


def _secrets(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    found = {what: environment.get(secret_variable(name, what)) for what in REMOTE_SECRETS}
    return {what: secret for what, secret in found.items() if secret}


def _spec(
    environment: Mapping[str, str],
    id_: int,
    name: str,
    url: str,
    options: str,
    reads: int,
    writes: int,
    budget_ms: int,
) -> RemoteSpec:
    try:
        known = {str(key): str(value) for key, value in json.loads(options).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"The options of the remote {name!r} are damaged; remove it and add it again."
        ) from error
    config = RemoteConfig(name, url, known, _secrets(name, environment))
    return RemoteSpec(id_, config, bool(reads), bool(writes), budget_ms)
