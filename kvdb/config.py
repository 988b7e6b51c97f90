"""Settings: a flag wins over ``KVDB_*``, that over ``kvdb.toml``, that over the default.

An unknown key or a bad value is an error, never ignored: a mistyped limit must not fill a disk.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdb.errors import UsageError
from kvdb.machine import memory_bytes

PREFIX = "KVDB_"
FILE_NAME = "kvdb.toml"
FILE_VARIABLE = "KVDB_CONFIG"
# A secret, and so no setting: it is never shown, and has no place in a file.
PASSPHRASE_VARIABLE = "KVDB_PASSPHRASE"  # noqa: S105 - its name
# A GPU computes state faster than a disk takes it: the queue holds what a long prompt is ahead.
LEAST_QUEUE_BYTES = 256 << 20
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: how its text is read and what it is when nobody sets it."""

    key: str
    parse: Callable[[object], Any]
    default: Callable[[], Any]
    help: str

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()


@dataclass(frozen=True, slots=True)
class Value:
    """A setting's value and where it came from: ``flag``, a variable, a file, or ``default``."""

    setting: Setting
    value: Any
    origin: str


class Settings:
    """The values of all settings; ``settings["store"]`` is a value, ``settings.all`` its story."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.all = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self.all[key].value


def size(value: object) -> int:
    """Bytes from ``10GB``, ``512MiB``, ``1.5g`` or a number. Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError("is not a size")
    if isinstance(value, int):
        number, unit = float(value), ""
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(value).lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError("is not a size like 10GB, 512MiB or 1000000")
        number, unit = float(match[1]), match[2]
    if number < 0:
        raise ValueError("is below 0")
    return int(number * _UNITS[unit])


def memory(value: object) -> int:
    """Bytes from a size, or from a share of this machine's memory such as ``20%``. Raises
    ValueError."""
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", str(value))
    if share is None:
        return size(value)
    if float(share[1]) > 100:
        raise ValueError("is more than 100%")
    return int(memory_bytes() * float(share[1]) / 100)


def _optional_memory(value: object) -> int | None:
    return None if str(value).lower() in ("", "none") else memory(value)


def _optional_size(value: object) -> int | None:
    return None if str(value).lower() in ("", "none") else size(value)


def _path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("is not a path")
    return Path(value).expanduser()


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("is not a whole number")
    try:
        return int(value)
    except ValueError:
        raise ValueError("is not a whole number") from None


def _optional_count(value: object) -> int | None:
    if str(value).lower() in ("", "none"):
        return None
    number = _count(value)
    if number < 0:
        raise ValueError("is below 0")
    return number


def _one_of(*names: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in names:
            raise ValueError(f"is not one of {', '.join(names)}")
        return str(value)

    return parse


def _data(name: str) -> Callable[[], Path]:
    def folder() -> Path:
        import platformdirs  # only where no flag or file names a folder

        return platformdirs.user_data_path("kvdb") / name

    return folder


def _cache() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("kvdb")


def _nothing() -> None:
    return None


SETTINGS: Mapping[str, Setting] = {
    setting.key: setting
    for setting in (
        Setting("store", _path, _data("store"), "folder of the store"),
        Setting("models", _path, _data("models"), "folder of pulled models"),
        Setting("cache", _path, _cache, "folder of files that can be made again"),
        Setting("max_bytes", _optional_size, _nothing, "hard limit of the store's size"),
        Setting("min_free_bytes", _optional_size, _nothing, "free disk space to leave"),
        Setting(
            "durability",
            _one_of("process", "power"),
            lambda: "process",
            "what an acknowledged block survives",
        ),
        Setting("codec", str, lambda: "raw", "how new blocks are encoded"),
        Setting(
            "queue_bytes",
            memory,
            lambda: max(LEAST_QUEUE_BYTES, memory("5%")),
            "memory for blocks waiting to be written",
        ),
        Setting("history_requests", _optional_count, _nothing, "newest requests to keep"),
        Setting("history_evictions", _optional_count, _nothing, "newest evictions to keep"),
        Setting("history_hours", _optional_count, _nothing, "hours of hourly totals to keep"),
        Setting("block_tokens", _count, lambda: 256, "tokens of one block"),
        Setting(
            "ram", memory, lambda: memory("20%"), "RAM for blocks in use: bytes, or 20%; 0 off"
        ),
        Setting("max_memory", _optional_memory, _nothing, "most memory of the process"),
        Setting("read_workers", _count, lambda: 4, "threads that read blocks"),
        Setting("read_ahead", _count, lambda: 3, "blocks read before they are needed"),
        Setting("reuse", _one_of("max", "exact"), lambda: "max", "how state is reused"),
    )
}


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> Settings:
    """Collect the settings. ``flags`` that are None were not given. Raises UsageError."""
    values: dict[str, Value] = {}
    file = config_file(environment, folder)
    if file is not None:
        for key, raw in _read(file).items():
            values[key] = _value(key, raw, str(file), f"{key} in {file}")
    for name, raw in sorted(environment.items()):
        if name.startswith(PREFIX) and name not in (FILE_VARIABLE, PASSPHRASE_VARIABLE):
            key = name.removeprefix(PREFIX).lower()
            values[key] = _value(key, raw, name, name)
    for key, raw in (flags or {}).items():
        if raw is not None:
            option = "--" + key.replace("_", "-")
            values[key] = _value(key, raw, f"flag {option}", option)
    return Settings(
        {
            key: values.get(key) or Value(setting, setting.default(), "default")
            for key, setting in SETTINGS.items()
        }
    )


def config_file(environment: Mapping[str, str], folder: Path | None = None) -> Path | None:
    """``$KVDB_CONFIG``, else ``kvdb.toml`` in the current folder, else in the user's config
    folder; None when there is none."""
    named = environment.get(FILE_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not _is_file(path):
            raise UsageError(f"{FILE_VARIABLE} names {path}, which is not a file.")
        return path
    here = (folder or Path()) / FILE_NAME
    if _is_file(here):
        return here
    import platformdirs

    user = platformdirs.user_config_path("kvdb") / FILE_NAME
    return user if _is_file(user) else None


def _is_file(path: Path) -> bool:
    """Also False in a folder that may not be searched, such as another user's."""
    try:
        return path.is_file()
    except PermissionError:
        return False


def _read(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file} cannot be read as TOML: {error}.") from error


def _value(key: str, raw: object, origin: str, shown: str) -> Value:
    setting = SETTINGS.get(key)
    if setting is None:
        raise UsageError(
            f"{shown} is not a setting of kvdb; known settings: {', '.join(SETTINGS)}."
        )
    try:
        return Value(setting, setting.parse(raw), origin)
    except ValueError as error:
        raise UsageError(f"{shown}: {raw!r} {error}.") from error
