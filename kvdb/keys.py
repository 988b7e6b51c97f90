"""Keys of those who may ask over HTTP: made from random bytes, shown once, kept as salted hashes.

A key reads ``kvdb_<id>_<secret>``. Its id is its row, and no secret; its secret has 256 bits, so
that one fast hash is enough: there is nothing to guess. A tenant's key carries a cache salt, which
gives the tenant key spaces of its own; all keys of one tenant have the same one, so that a new key
finds what the old one stored.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from kvdb.backup import BACKUP_NAME, refresh_backup
from kvdb.errors import KvdbError, StoreMissing, UsageError

if TYPE_CHECKING:
    from kvdb.driver import Connection
    from kvdb.store import Store

log = logging.getLogger("kvdb.keys")

Role = Literal["main", "admin", "tenant"]
ROLES: tuple[Role, ...] = get_args(Role)
KEY = re.compile(r"kvdb_([1-9][0-9]{0,17})_([A-Za-z0-9_-]{43})", re.ASCII)
MAX_NAME = 200
# The tenant that requests without a key are of, where everybody may ask: nobody has a key of it.
ANYBODY = "anonymous"
# A use is written at most this often a key: time enough to see which keys nobody uses.
USE_SECONDS = 60.0

COLUMNS = "id, role, tenant, name, cache_salt, created_at, last_used_at, revoked_at"
INSERT = (
    "INSERT INTO keys (role, tenant, name, hash_salt, hash, cache_salt, created_at) "  # noqa: S608
    f"VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING {COLUMNS}"
)
LIST = f"SELECT {COLUMNS} FROM keys ORDER BY id"  # noqa: S608 - our own names
FIND = f"SELECT hash_salt, hash, {COLUMNS} FROM keys WHERE id = ?"  # noqa: S608
ANY = "SELECT EXISTS (SELECT 1 FROM keys WHERE revoked_at IS NULL)"
REVOKE = (
    "UPDATE keys SET revoked_at = coalesce(revoked_at, ?) WHERE id = ? "  # noqa: S608
    f"RETURNING {COLUMNS}"
)
TENANT_SALT = (
    "SELECT cache_salt FROM keys WHERE tenant = ? AND length(cache_salt) > 0 ORDER BY id LIMIT 1"
)
NOTE_USE = "UPDATE keys SET last_used_at = max(coalesce(last_used_at, 0), ?) WHERE id = ?"


@dataclass(frozen=True, slots=True)
class Key:
    """A key without its secret; times in Unix µs. ``cache_salt`` is empty for a role without a
    tenant, and for a tenant that shares the key spaces of all others who have no salt."""

    id: int
    role: Role
    tenant: str
    name: str
    cache_salt: bytes
    created_at: int
    last_used_at: int | None
    revoked_at: int | None


class NewKey(NamedTuple):
    """A key just made; ``text`` is what its owner sends, and is kept nowhere."""

    key: Key
    text: str


def create_key(
    store: Store,
    role: Role,
    *,
    tenant: str = "",
    name: str = "",
    shared: bool = False,
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> NewKey:
    """Make a key: ``main`` for inference and the overview, ``admin`` for everything, ``tenant`` for
    inference of one tenant, whose blocks nobody else sees unless ``shared``. ``name`` is for
    people. Raises UsageError."""
    if role not in ROLES:
        raise UsageError(f"A key's role is one of {', '.join(ROLES)}, not {role!r}.")
    if (role == "tenant") != bool(tenant):
        raise UsageError("A tenant's key needs a tenant, and no other key has one.")
    if tenant == ANYBODY:
        raise UsageError(f"The tenant {ANYBODY} is whoever asks without a key: take another name.")
    if shared and role != "tenant":
        raise UsageError("Only a tenant's key can be shared.")
    for text in (tenant, name):
        if len(text) > MAX_NAME or not text.isprintable():
            raise UsageError(f"Names are printable text of at most {MAX_NAME} characters.")
    secret = base64.urlsafe_b64encode(random_bytes(32)).rstrip(b"=")
    hash_salt, fresh_salt = random_bytes(16), random_bytes(32)
    store.require_writable()
    with store.database.write(durable=True) as connection:
        cache_salt = b""
        if tenant and not shared:
            known = connection.execute(TENANT_SALT, (tenant,)).fetchone()
            cache_salt = fresh_salt if known is None else bytes(known[0])
        values = (role, tenant, name, hash_salt, _hash(hash_salt, secret), cache_salt)
        row = connection.execute(INSERT, (*values, store.environment.now_us())).fetchone()
    _renew_backup(store)
    return NewKey(Key(*row), f"kvdb_{row[0]}_{secret.decode()}")


def list_keys(store: Store) -> list[Key]:
    """All keys, revoked ones too."""
    with store.database.read() as connection:
        return [Key(*row) for row in connection.execute(LIST)]


def revoke_key(store: Store, key_id: int) -> Key:
    """End a key for good, in every process that serves this store. Raises StoreMissing when there
    is none of that id."""
    store.require_writable()
    with store.database.write(durable=True) as connection:
        row = connection.execute(REVOKE, (store.environment.now_us(), key_id)).fetchone()
    if row is None:
        raise StoreMissing(f"There is no key {key_id}; see kvdb keys list.")
    _renew_backup(store)
    return Key(*row)


def _renew_backup(store: Store) -> None:
    """A rebuild that has to fall back on the backup must not bring a revoked key back."""
    if not (store.path / BACKUP_NAME).exists():
        return
    try:
        refresh_backup(store.database, store.limit, store.fs, store.environment, age=0.0)
    except (OSError, KvdbError) as error:
        log.warning("index.backup still has the keys of before: %s", error)


class Keyring:
    """The keys of a store, as a server asks for them: every time, so that a key revoked by another
    process ends at once. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}  # noted and not yet written: id → Unix µs
        self._written: dict[int, float] = {}  # id → seconds of the monotonic clock

    def any(self) -> bool:
        """Whether some key is valid now."""
        with self._store.database.read() as connection:
            return bool(connection.execute(ANY).fetchone()[0])

    def find(self, text: str) -> Key | None:
        """The valid key that ``text`` is, whose use is noted; None for anything else. What it took
        says nothing about how much of a secret was right."""
        match = KEY.fullmatch(text)
        if match is None:
            return None
        with self._store.database.read() as connection:
            row = connection.execute(FIND, (int(match[1]),)).fetchone()
        hash_salt, expected, *rest = row or (bytes(16), bytes(32))
        right = hmac.compare_digest(_hash(hash_salt, match[2].encode()), expected)
        if row is None or not right:
            return None
        key = Key(*rest)
        if key.revoked_at is not None:
            return None
        self._note(key.id)
        return key

    def _note(self, key_id: int) -> None:
        now = self._store.environment.seconds()
        with self._lock:
            self._used[key_id] = self._store.environment.now_us()
            written = self._written.get(key_id)
            due = written is None or now - written >= USE_SECONDS
            if due:
                self._written[key_id] = now
        if due:
            self.flush()

    def flush(self) -> None:
        """Have the noted uses written, with the store's next commit in the background."""
        with self._lock:
            used, self._used = list(self._used.items()), {}

        def write(connection: Connection) -> None:
            connection.executemany(NOTE_USE, [(at, key_id) for key_id, at in used])

        if used and not self._store.read_only:
            self._store.later(write)


def _hash(salt: bytes, secret: bytes) -> bytes:
    return hmac.digest(salt, secret, hashlib.sha256)
