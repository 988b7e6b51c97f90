"""Remotes by scheme of their URL: one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


# Options that every kind takes; the kinds do not see them.
COMMON = ("encrypt", "salted", "timeout")
MAX_TIMEOUT_SECONDS = 600.0


def open_remote(config: RemoteConfig) -> Remote:
    """Open a remote; with the option ``encrypt``, sealed. Raises UsageError for a URL or an option
    that is none, or where the remote's package is not installed; RemoteError where it cannot be
    reached."""
    if config.scheme not in SCHEMES or "://" not in config.url:
        raise UsageError(
            f"{config.url!r} is no remote; its URL begins with one of "
            f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}."
        )
    own = {key: value for key, value in config.options.items() if key not in COMMON}
    if config.options.get("salted", "false") not in ("true", "false"):
        raise UsageError("The option salted is true or false.")
    seal = None
    if "encrypt" in config.options:
        from kvdb.remotes.sealed import Seal

        seal = Seal.of(config)  # before anything is reached: what is wrong there is said first
    module, function = SCHEMES[config.scheme]
    opener = cast(Callable[[RemoteConfig], Remote], getattr(import_module(module), function))
    remote = opener(replace(config, options=own, timeout_seconds=_timeout(config)))
    return remote if seal is None else seal.around(remote)


def _timeout(config: RemoteConfig) -> float:
    text = config.options.get("timeout")
    if text is None:
        return config.timeout_seconds
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise UsageError(f"The option timeout is seconds, up to {MAX_TIMEOUT_SECONDS:.0f}.")
    return seconds
