"""Object storage by URL: ``s3://BUCKET/PREFIX``, ``gs://BUCKET/PREFIX``, ``az://CONTAINER/PREFIX``.

Keys come from the environment of the remote (``KVDB_REMOTE_NAME_…``), else from where the cloud's
own clients look: ``AWS_…``, ``GOOGLE_…`` and ``AZURE_…`` variables, a service account's file, the
machine's own role.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from kvdb.errors import UsageError
from kvdb.remotes.remote import Remote, RemoteConfig

if TYPE_CHECKING:
    from kvdb.remotes.objects import ObjectsRemote

BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
CONNECT_SECONDS = 5.0
RETRIES = 2  # of 5xx answers and of connections that broke
FIRST_RETRY = timedelta(milliseconds=50)


class Option(NamedTuple):
    """Which setting of obstore an option of ours is, and how its text is read."""

    setting: str
    read: Callable[[str], Any] = str


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("is true or false")
    return text.lower() == "true"


def _endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ValueError("is a URL like https://host:port")
    if parts.username or parts.password:
        raise ValueError("holds no user and no password: they come from the environment")
    return text.rstrip("/")


def _certificate(text: str) -> bytes:
    try:
        return Path(text).read_bytes()
    except OSError as error:
        raise ValueError(f"is a file of certificates in PEM ({error.strerror})") from None


# Settings of the connection, of all three.
CLIENT_OPTIONS = {
    "allow_http": Option("allow_http", _truth),
    "root_certificate": Option("root_certificate", _certificate),
}
S3_OPTIONS = {
    "endpoint": Option("endpoint", _endpoint),
    "region": Option("region"),
    "virtual_hosted_style": Option("virtual_hosted_style_request", _truth),
    "anonymous": Option("skip_signature", _truth),
    "unsigned_payload": Option("unsigned_payload", _truth),
    "request_payer": Option("request_payer", _truth),
    "server_side_encryption": Option("server_side_encryption"),
    "kms_key": Option("sse_kms_key_id"),
}
GCS_OPTIONS = {
    "endpoint": Option("base_url", _endpoint),
    "anonymous": Option("skip_signature", _truth),
}
AZURE_OPTIONS = {
    "account": Option("account_name"),
    "endpoint": Option("endpoint", _endpoint),
    "anonymous": Option("skip_signature", _truth),
}
# Secrets of a remote → settings.
S3_SECRETS = {
    "access_key_id": "access_key_id",
    "secret_access_key": "secret_access_key",
    "session_token": "session_token",
}
GCS_SECRETS = {"account_key": "service_account_key", "session_token": "bearer_token"}
AZURE_SECRETS = {"account_key": "account_key", "sas_token": "sas_key"}


def open_s3(config: RemoteConfig) -> Remote:
    """Raises UsageError for what cannot be meant, RemoteError where the bucket cannot be used."""

    def settings(bucket: str, given: dict[str, Any]) -> None:
        if given.get("virtual_hosted_style_request") and "endpoint" in given:
            scheme, _, rest = given["endpoint"].partition("://")
            given["endpoint"] = f"{scheme}://{bucket}.{rest}"
        if "access_key_id" in config.secrets and "secret_access_key" in config.secrets:
            # Given so, they are not mixed with AWS_SESSION_TOKEN of another account.
            given["credential_provider"] = _provider(
                *(given.pop(name, None) for name in S3_SECRETS)
            )

    return _open(config, "S3Store", S3_OPTIONS, S3_SECRETS, settings)


def _provider(key_id: str, key: str, token: str | None) -> Callable[[], dict[str, str | None]]:
    """What obstore asks for keys, which do not expire."""
    answer = {"access_key_id": key_id, "secret_access_key": key, "token": token, "expires_at": None}
    return lambda: answer


def open_gcs(config: RemoteConfig) -> Remote:
    """As :func:`open_s3`."""
    return _open(config, "GCSStore", GCS_OPTIONS, GCS_SECRETS)


def open_azure(config: RemoteConfig) -> Remote:
    """As :func:`open_s3`."""
    if "account" not in config.options and "AZURE_STORAGE_ACCOUNT_NAME" not in os.environ:
        raise UsageError(
            "Azure needs the storage account's name: --option account=NAME, or the variable "
            "AZURE_STORAGE_ACCOUNT_NAME."
        )
    return _open(config, "AzureStore", AZURE_OPTIONS, AZURE_SECRETS)


def _open(
    config: RemoteConfig,
    store: str,
    options: Mapping[str, Option],
    secrets: Mapping[str, str],
    adapt: Callable[[str, dict[str, Any]], None] | None = None,
) -> Remote:
    bucket, prefix = _place(config)
    settings, client = _settings(config, options), _settings(config, CLIENT_OPTIONS)
    unknown = sorted(config.options.keys() - options.keys() - CLIENT_OPTIONS.keys())
    if unknown:
        names = ", ".join(sorted([*options, *CLIENT_OPTIONS]))
        raise UsageError(f"{config.scheme}:// takes no option {unknown[0]!r}; it takes {names}.")
    if "http://" in config.options.get("endpoint", "") and not client.get("allow_http"):
        raise UsageError("The endpoint is not encrypted; allow that by the option allow_http=true.")
    settings |= {secrets[name]: text for name, text in config.secrets.items() if name in secrets}
    if adapt is not None:
        adapt(bucket, settings)
    return _connect(config, store, bucket, prefix, settings, client, secrets)


def _place(config: RemoteConfig) -> tuple[str, str | None]:
    """Bucket and prefix."""
    parts = urlsplit(config.url)
    if not BUCKET.fullmatch(parts.netloc) or parts.query or parts.fragment:
        raise UsageError(
            f"{config.url!r} names no bucket: write {config.scheme}://bucket or "
            f"{config.scheme}://bucket/prefix."
        )
    return parts.netloc, unquote(parts.path).strip("/") or None


def _settings(config: RemoteConfig, options: Mapping[str, Option]) -> dict[str, Any]:
    found = {}
    for name in options.keys() & config.options.keys():
        try:
            found[options[name].setting] = options[name].read(config.options[name])
        except ValueError as error:
            raise UsageError(f"The option {name} {error}.") from None
    return found


def _connect(
    config: RemoteConfig,
    kind: str,
    bucket: str,
    prefix: str | None,
    settings: dict[str, Any],
    client: dict[str, Any],
    secrets: Mapping[str, str],
) -> Remote:
    try:
        import obstore.store
    except ImportError:
        raise UsageError(
            f"{config.scheme}:// needs the package obstore: pip install 'kvdb[s3]'."
        ) from None
    from kvdb.remotes.objecterrors import Refusals
    from kvdb.remotes.objects import ObjectsRemote

    refusals = Refusals(f"{config.scheme}://{bucket}", _variables(config, secrets))
    seconds = config.timeout_seconds
    provider = settings.pop("credential_provider", None)
    try:
        store = getattr(obstore.store, kind)(
            bucket,
            prefix=prefix,
            config=settings,
            credential_provider=provider,
            client_options={
                "timeout": timedelta(seconds=2 * seconds),  # the remote's own comes first
                "connect_timeout": timedelta(seconds=min(seconds, CONNECT_SECONDS)),
                **client,
            },
            retry_config={
                "max_retries": RETRIES,
                "retry_timeout": timedelta(seconds=seconds),
                "backoff": {"init_backoff": FIRST_RETRY},
            },
        )
    except refusals.errors as error:
        raise UsageError(refusals.unusable(error)) from None
    remote: ObjectsRemote = ObjectsRemote(store, refusals, seconds)
    try:
        remote.probe()
    except BaseException:
        remote.close()
        raise
    return remote


def _variables(config: RemoteConfig, secrets: Mapping[str, str]) -> str:
    """Where keys are given, for sentences."""
    stem = f"KVDB_REMOTE_{config.name.upper().replace('-', '_')}"
    return " and ".join(f"{stem}_{name.upper()}" for name in list(secrets)[:2])
