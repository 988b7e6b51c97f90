"""Where the engine keeps what outlives a process: models (data) and derived files (cache)."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

APPLICATION = "kvdb"


def models_folder() -> Path:
    """``$KVDB_MODELS``, else ``models`` in the user's data folder. Not created here."""
    configured = os.environ.get("KVDB_MODELS")
    if configured:
        return Path(configured).expanduser()
    return platformdirs.user_data_path(APPLICATION) / "models"


def cache_folder() -> Path:
    """``$KVDB_CACHE``, else the user's cache folder. Everything in it can be made again."""
    configured = os.environ.get("KVDB_CACHE")
    if configured:
        return Path(configured).expanduser()
    return platformdirs.user_cache_path(APPLICATION)


def private_folder(path: Path) -> Path:
    """Create ``path`` for this user only, if it is missing, and return it."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path
