"""A model's identity by content: digests of its files, remembered while the files do not change."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.folders import private_folder
from kvdb.errors import ModelError
from kvdb.identity import ModelIdentity, canonical_json

# A file changed this recently may change again within one tick of its clock: not remembered.
RACY_SECONDS = 2.0
MEMORY_FILE = "digests.json"
MEMORY_ENTRIES = 4096
WEIGHTS = "model*.safetensors"

Signature = tuple[int, int, int, int, int]


def signature(path: Path) -> Signature:
    """(device, inode, size, mtime_ns, ctime_ns): equal only while the file is the same."""
    status = path.stat()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class DigestMemory:
    """SHA-256 of files, remembered in one small JSON file in ``folder``.

    Losing the memory, or not being able to write it, only costs reading the files again.
    """

    def __init__(self, folder: Path, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._path = folder / MEMORY_FILE
        self._known: dict[str, str] = _read_memory(self._path)
        self._changed = False

    def digest(self, path: Path) -> str:
        """Hex SHA-256 of a file's content. Raises OSError, or ModelError if it changes now."""
        before = signature(path)
        key = ":".join(map(str, before))
        known = self._known.pop(key, None)
        if known is None:
            with path.open("rb") as file:
                known = hashlib.file_digest(file, "sha256").hexdigest()
            if signature(path) != before:
                raise ModelError(f"{path} changes while it is read: try again when it is complete.")
            if self._now() - max(before[3], before[4]) / 1e9 < RACY_SECONDS:
                return known
            self._changed = True
        self._known[key] = known  # last: the newest survive trimming
        return known

    def knows(self, path: Path) -> bool:
        """Is the digest of a file remembered, so that asking for it reads nothing?"""
        return ":".join(map(str, signature(path))) in self._known

    def save(self) -> None:
        """Publish what was learned, by rename; failure is no error."""
        if not self._changed:
            return
        newest = dict(list({**_read_memory(self._path), **self._known}.items())[-MEMORY_ENTRIES:])
        try:
            private_folder(self._path.parent)
            descriptor, name = tempfile.mkstemp(prefix=".digests-", dir=self._path.parent)
            with os.fdopen(descriptor, "w") as file:
                json.dump(newest, file)
            Path(name).replace(self._path)
        except OSError:
            return
        self._changed = False


def _read_memory(path: Path) -> dict[str, str]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {
        key: value for key, value in document.items() if isinstance(value, str) and len(value) == 64
    }


def identity_files(
    folder: Path, config: Mapping[str, Any], adapters: Sequence[Path] = ()
) -> list[Path]:
    """Every file that state depends on; each must keep its signature while the model is loaded."""
    files = [folder / "config.json", *weight_files(folder)]
    files += [path for path in (folder / "hf_quant_config.json",) if path.exists()]
    if config.get("model_file"):
        files.append(folder / str(config["model_file"]))
    for adapter in adapters:
        files += adapter_files(adapter)
    return files


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(WEIGHTS))


def adapter_files(adapter: Path) -> list[Path]:
    return [adapter / "adapter_config.json", adapter / "adapters.safetensors"]


def model_identity(
    folder: Path,
    config: Mapping[str, Any],
    memory: DigestMemory,
    *,
    adapters: Sequence[Path] = (),
    overrides: Mapping[str, Any] | None = None,
    weights: Sequence[Path] | None = None,
) -> ModelIdentity:
    """The identity of the model in ``folder``. File names order the weights and say what a file
    is for; they do not enter it, so a moved or renamed model keeps its cache. ``weights`` are
    all of its weight files, unless given."""
    content = hashlib.sha256()
    for path in weight_files(folder) if weights is None else weights:
        content.update(bytes.fromhex(memory.digest(path)))
    changes = {key: canonical_json(value) for key, value in (overrides or {}).items()}
    quantization = folder / "hf_quant_config.json"
    if quantization.exists():
        changes["\0hf_quant_config"] = memory.digest(quantization)
    model_file = config.get("model_file")
    return ModelIdentity(
        weights=content.hexdigest(),
        config=memory.digest(folder / "config.json"),
        overrides=changes,
        adapters=tuple(_adapter_digest(adapter, memory) for adapter in adapters),
        code=memory.digest(folder / str(model_file)) if model_file else None,
    )


def _adapter_digest(adapter: Path, memory: DigestMemory) -> str:
    digest = hashlib.sha256()
    for path in adapter_files(adapter):
        digest.update(bytes.fromhex(memory.digest(path)))
    return digest.hexdigest()
