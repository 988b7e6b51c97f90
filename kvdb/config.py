"""Settings: a flag wins over ``KVDB_*``, that over ``kvdb.toml``, that over the default.

``kvdb serve`` has settings of its own, in the table ``[serve]`` (``KVDB_SERVE_*``). Some settings
can also be given for one model, in ``[models."NAME"]``: they hold where nothing else was said. An
unknown key or a bad value is an error, never ignored: a mistyped limit must not fill a disk.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvdb.errors import UsageError
from kvdb.machine import memory_bytes

PREFIX = "KVDB_"
FILE_NAME = "kvdb.toml"
FILE_VARIABLE = "KVDB_CONFIG"
# A secret, and so no setting: it is never shown, and has no place in a file.
PASSPHRASE_VARIABLE = "KVDB_PASSPHRASE"  # noqa: S105 - its name
# Secrets of remotes are none either: KVDB_REMOTE_<NAME>_<WHAT>, with one of these for WHAT.
REMOTE_PREFIX = "KVDB_REMOTE_"
REMOTE_SECRETS = (
    "password",
    "username",
    "access_key_id",
    "secret_access_key",
    "session_token",
    "account_key",
    "sas_token",
    "passphrase",
    "identity",
)
T = TypeVar("T")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
DEFAULT = "default"
SERVE = "serve."
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
    per_model: bool = False

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper().replace(".", "_")

    @property
    def name(self) -> str:
        """The key inside its table, and the flag."""
        return self.key.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Value:
    """A setting's value and where it came from: ``flag``, a variable, a file, or ``default``."""

    setting: Setting
    value: Any
    origin: str


class Settings:
    """The values of all settings; ``settings["store"]`` is a value, ``settings.all`` its story.
    ``models`` are the sections of single models, as they are written."""

    def __init__(
        self, values: Mapping[str, Value], models: Mapping[str, Mapping[str, Value]] | None = None
    ) -> None:
        self.all = dict(values)
        self.models = dict(models or {})

    def __getitem__(self, key: str) -> Any:
        return self.all[key].value

    def for_model(self, name: str) -> dict[str, Value]:
        """What holds for one model, by name of the setting: its section's values where nobody set
        them for all."""
        section = self.models.get(name, {})
        return {
            setting.name: section.get(setting.name, self.all[setting.key])
            if self.all[setting.key].origin == DEFAULT
            else self.all[setting.key]
            for setting in SETTINGS.values()
            if setting.per_model
        }


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


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise ValueError("is not true or false")
    return text in _TRUE


def _number(low: float, high: float = math.inf) -> Callable[[object], float]:
    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError("is not a number")
        try:
            number = float(value)
        except ValueError:
            raise ValueError("is not a number") from None
        if not low <= number <= high or number == math.inf:
            upto = "" if high == math.inf else f" to {high:g}"
            raise ValueError(f"is not a number from {low:g}{upto or ' on'}")
        return number

    return parse


def _counted(low: int, high: int | None = None) -> Callable[[object], int]:
    def parse(value: object) -> int:
        number = _count(value)
        if number < low or (high is not None and number > high):
            upto = " on" if high is None else f" to {high}"
            raise ValueError(f"is not a whole number from {low}{upto}")
        return number

    return parse


def _optional(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if str(value).lower() in ("", "none") else parse(value)


def _texts(value: object) -> tuple[str, ...]:
    """A list of texts; in a variable they are separated by commas."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ValueError("is not a list of texts")
    return tuple(value)


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


def _always(value: T) -> Callable[[], T]:
    return lambda: value


_nothing = _always(None)
_SERVING = (
    Setting("serve.host", str, _always("127.0.0.1"), "address to listen on"),
    Setting("serve.port", _counted(0, 65535), _always(8080), "port to listen on; 0 finds one"),
    Setting("serve.no_auth", _flag, _always(False), "no keys, on this machine only"),
    Setting(
        "serve.allow_unauthenticated_inference",
        _flag,
        _always(False),
        "everybody may ask models; administration still needs a key",
    ),
    Setting("serve.cors_origins", _texts, _always(()), "sites whose pages may call the server"),
    Setting("serve.allowed_hosts", _texts, _always(()), "names the server is called by"),
    Setting("serve.max_body_bytes", size, _always(16 << 20), "largest body of a request"),
    Setting("serve.max_nesting", _counted(1), _always(64), "deepest nesting of a body"),
    Setting("serve.max_messages", _counted(1), _always(10_000), "most messages of a request"),
    Setting("serve.max_answer_tokens", _optional(_counted(1)), _nothing, "longest answer"),
    Setting(
        "serve.max_waiting", _counted(0), _always(64), "requests that wait beside those at work"
    ),
    Setting(
        "serve.header_seconds", _number(0.1), _always(10.0), "for a client to send its headers"
    ),
    Setting("serve.body_seconds", _number(0.1), _always(60.0), "for a client to send its body"),
    Setting("serve.max_connections", _counted(1), _always(512), "connections at once"),
    Setting(
        "serve.request_seconds", _optional(_number(0.1)), _nothing, "longest time of a request"
    ),
    Setting(
        "serve.keep_alive_seconds", _number(0.1), _always(10.0), "silence of a stream, at most"
    ),
    Setting(
        "serve.drain_seconds", _number(0), _always(30.0), "for requests to end when the server does"
    ),
    Setting("serve.max_models", _optional(_counted(1)), _nothing, "models in memory at once"),
    # Of a model:
    Setting("serve.aliases", _texts, _always(()), "other names of a model; * fits any text", True),
    Setting(
        "serve.max_tokens", _counted(1), _always(4096), "tokens of an answer, unless it says", True
    ),
    Setting("serve.temp", _number(0), _always(0.0), "sampling temperature", True),
    Setting("serve.top_p", _number(0, 1), _always(1.0), "sampling top-p", True),
    Setting("serve.top_k", _counted(0), _always(0), "sampling top-k", True),
    Setting("serve.min_p", _number(0, 1), _always(0.0), "sampling min-p", True),
    Setting("serve.max_running", _counted(1), _always(8), "requests at work at once", True),
    Setting("serve.unload_seconds", _optional(_number(0)), _nothing, "idle time in memory", True),
    Setting("serve.pinned", _flag, _always(False), "keep in memory", True),
    Setting("serve.adapter_path", _optional(_path), _nothing, "folder of an adapter", True),
    Setting("serve.kv_bits", _optional(_count), _nothing, "bits of a quantised KV cache", True),
    Setting("serve.kv_group_size", _count, _always(64), "group size of KV quantisation", True),
    Setting(
        "serve.prefill_step_size",
        _optional(_counted(1)),
        _nothing,
        "prompt tokens of one forward pass",
        True,
    ),
    Setting("serve.trust_remote_code", _flag, _always(False), "run code a model brings", True),
)
SETTINGS: Mapping[str, Setting] = {
    setting.key: setting
    for setting in (
        Setting("store", _path, _data("store"), "folder of the store"),
        Setting("models", _path, _data("models"), "folder of pulled models"),
        Setting("cache", _path, _cache, "folder of files that can be made again"),
        Setting("max_bytes", _optional(size), _nothing, "hard limit of the store's size"),
        Setting("min_free_bytes", _optional(size), _nothing, "free disk space to leave"),
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
        Setting("history_requests", _optional(_counted(0)), _nothing, "newest requests to keep"),
        Setting("history_evictions", _optional(_counted(0)), _nothing, "newest evictions to keep"),
        Setting(
            "history_hours", _optional(_counted(0)), _nothing, "hours of hourly totals to keep"
        ),
        Setting("block_tokens", _count, lambda: 256, "tokens of one block", True),
        Setting(
            "ram", memory, lambda: memory("20%"), "RAM for blocks in use: bytes, or 20%; 0 off"
        ),
        Setting("max_memory", _optional(memory), _nothing, "most memory of the process"),
        Setting("read_workers", _count, lambda: 4, "threads that read blocks"),
        Setting("read_ahead", _count, lambda: 3, "blocks read before they are needed"),
        Setting("reuse", _one_of("max", "exact"), lambda: "max", "how state is reused", True),
        *_SERVING,
    )
}


_VARIABLES = {setting.variable: setting for setting in SETTINGS.values()}
_OF_MODELS = {setting.name: setting for setting in SETTINGS.values() if setting.per_model}


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> Settings:
    """Collect the settings. ``flags`` that are None were not given. Raises UsageError."""
    values: dict[str, Value] = {}
    models: dict[str, dict[str, Value]] = {}
    file = config_file(environment, folder)
    if file is not None:
        document = _read(file)
        models = _sections(document, file)
        for key, raw in _flat(document).items():
            values[key] = _value(SETTINGS.get(key), raw, str(file), f"{key} in {file}")
    for name, raw in sorted(environment.items()):
        if name.startswith(PREFIX) and not _is_no_setting(name):
            setting = _VARIABLES.get(name)
            value = _value(setting, raw, name, name)
            values[value.setting.key] = value
    for key, raw in (flags or {}).items():
        if raw is not None:
            option = "--" + key.rpartition(".")[2].replace("_", "-")
            values[key] = _value(SETTINGS.get(key), raw, f"flag {option}", option)
    return Settings(
        {
            key: values.get(key) or Value(setting, setting.default(), DEFAULT)
            for key, setting in SETTINGS.items()
        },
        models,
    )


def secret_variable(remote: str, what: str) -> str:
    """The variable that holds a secret of a remote."""
    return f"{REMOTE_PREFIX}{remote}_{what}".replace("-", "_").upper()


def _is_no_setting(variable: str) -> bool:
    """True for the variables that mean something else than a setting."""
    if variable in (FILE_VARIABLE, PASSPHRASE_VARIABLE):
        return True
    ends = tuple(f"_{what.upper()}" for what in REMOTE_SECRETS)
    return variable.startswith(REMOTE_PREFIX) and variable.endswith(ends)


def _sections(document: dict[str, object], file: Path) -> dict[str, dict[str, Value]]:
    """Take the sections of models out of ``document``. Beside them ``models`` may hold what it is
    without any: the folder of pulled models, as ``folder``."""
    tables = document.get("models")
    if not isinstance(tables, dict):
        return {}
    del document["models"]
    if isinstance(tables.get("folder"), str):
        document["models"] = tables.pop("folder")
    sections: dict[str, dict[str, Value]] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f'models.{name} in {file}: a model is a table: [models."{name}"].')
        origin = f'[models."{name}"] in {file}'
        sections[name] = {
            key: _value(_OF_MODELS.get(key), raw, origin, f"{key} of {origin}", _OF_MODELS)
            for key, raw in table.items()
        }
    return sections


def _flat(document: Mapping[str, object]) -> dict[str, object]:
    """The table of serving with its keys as ``serve.KEY``."""
    flat = dict(document)
    table = flat.pop("serve", {})
    if not isinstance(table, dict):
        return {**flat, "serve": table}
    return flat | {SERVE + key: raw for key, raw in table.items()}


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


def _value(
    setting: Setting | None,
    raw: object,
    origin: str,
    shown: str,
    known: Mapping[str, Setting] | None = None,
) -> Value:
    if setting is None:
        names = ", ".join(SETTINGS if known is None else known)
        raise UsageError(f"{shown} is not a setting of kvdb; known settings: {names}.")
    try:
        return Value(setting, setting.parse(raw), origin)
    except ValueError as error:
        raise UsageError(f"{shown}: {raw!r} {error}.") from error
