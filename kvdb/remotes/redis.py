"""Redis and Valkey as remotes: ``redis://host:port/db/prefix``, ``rediss://`` by TLS, a server or a
cluster. Here: what an address and its options say; the client is imported when one is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from kvdb.errors import UsageError
from kvdb.remotes.remote import Remote, RemoteConfig

DEFAULT_PORT = 6379
DEFAULT_PREFIX = "kvdb"


def open_redis(config: RemoteConfig) -> Remote:
    """Raises UsageError for an address or option that is none, RemoteError where the server cannot
    be used."""
    address = parse_address(config)
    ttl_seconds = positive_option(config.options, "ttl")
    max_bytes = positive_option(config.options, "max_bytes")
    try:
        from kvdb.remotes.redis_client import RedisClient
        from kvdb.remotes.redis_connections import connect
        from kvdb.remotes.redis_remote import RedisRemote
    except ImportError:
        raise UsageError(
            f"{config.scheme}:// needs the packages redis and hiredis: pip install 'kvdb[redis]'."
        ) from None
    client = RedisClient(connect(config, address), address)
    return RedisRemote(client, max_bytes=max_bytes, ttl_seconds=ttl_seconds)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a remote is, and what its keys there begin with."""

    name: str
    host: str
    port: int
    db: int
    prefix: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def key(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def own(self, raw: bytes) -> str | None:
        """The key of an object from its name there; None for a name that is none of ours."""
        try:
            return raw.decode().removeprefix(f"{self.prefix}/")
        except UnicodeDecodeError:
            return None


def parse_address(config: RemoteConfig) -> Address:
    """Raises UsageError. A path is a database's number, a prefix, or both."""
    parts = urlsplit(config.url)
    if parts.username or parts.password or "password" in config.options:
        raise UsageError(
            "A password has no place in a remote's URL or options: "
            f"set {secret_variable(config.name)}."
        )
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError:
        port = 0
    if not parts.hostname or not port or parts.query or parts.fragment:
        raise UsageError(
            "A Redis remote's URL is redis://HOST:PORT/DB/PREFIX, and options are beside it."
        )
    path = [unquote(part) for part in parts.path.split("/") if part]
    db = int(path.pop(0)) if path and path[0].isdecimal() else 0
    return Address(config.name, parts.hostname, port, db, "/".join(path) or DEFAULT_PREFIX)


def positive_option(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"The option {name} of a Redis remote is a whole number, not {text!r}.")
    return int(text)


def secret_variable(name: str) -> str:
    return f"KVDB_REMOTE_{name.upper().replace('-', '_')}_PASSWORD"
