"""Remotes by scheme of their URL: one line each."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from kvdb.errors import UsageError
from kvdb.remotes.remote import Remote, RemoteConfig

# Scheme → module and function, which takes a RemoteConfig. Imported when one is opened.
SCHEMES = {
    "file": ("kvdb.remotes.folder", "open_folder"),
    "s3": ("kvdb.remotes.clouds", "open_s3"),
    "gs": ("kvdb.remotes.clouds", "open_gcs"),
    "az": ("kvdb.remotes.clouds", "open_azure"),
    "redis": ("kvdb.remotes.redis", "open_redis"),
    "rediss": ("kvdb.remotes.redis", "open_redis"),
    "mooncake": ("kvdb.remotes.mooncake", "open_mooncake"),
}


def open_remote(config: RemoteConfig) -> Remote:
    """Raises UsageError for a URL or an option that is none, or where the remote's package is not
    installed; RemoteError where it cannot be reached."""
    if config.scheme not in SCHEMES or "://" not in config.url:
        raise UsageError(
            f"{config.url!r} is no remote; its URL begins with one of "
            f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}."
        )
    module, function = SCHEMES[config.scheme]
    opener = cast(Callable[[RemoteConfig], Remote], getattr(import_module(module), function))
    return opener(config)
