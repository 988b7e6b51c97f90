"""A fast BLAS for MLX on Linux CPUs: loaded before ``mlx.core``, so that its symbols win.

MLX's wheel brings the reference BLAS, about 20 times slower than OpenBLAS. The dynamic linker
takes a symbol from whoever was loaded first with RTLD_GLOBAL, so no file of MLX is touched.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engine.folders import cache_folder, private_folder

SYSTEM_LIBRARY = "libopenblas.so.0"
WHEEL = "scipy-openblas32"
WHEEL_MODULE = "scipy_openblas32"
WHEEL_LIBRARY = "libscipy_openblas.so"
PREFIX = b"scipy_"


@dataclass(frozen=True, slots=True)
class Blas:
    """Which BLAS serves MLX in this process. ``source`` is ``system``, ``wheel``, ``bundled``
    (MLX's own; ``note`` says why) or ``none`` (this platform needs no help). ``core`` is the kind
    of processor that its kernels were chosen for."""

    source: str
    name: str
    version: str | None = None
    path: str | None = None
    threads: int | None = None
    core: str | None = None
    note: str | None = None


@functools.cache
def preload() -> Blas:
    """Load OpenBLAS into this process if MLX will run on a Linux CPU; say what was done.

    Call it before anything imports ``mlx.core``. It never raises: the fallback is slow, not wrong.
    A process has one BLAS, so the answer is remembered.
    """
    if sys.platform != "linux":
        return Blas("none", "the platform's own")
    if "mlx.core" in sys.modules:
        return Blas("bundled", "reference", note="mlx.core was imported before engine.blas")
    if _has_cuda():
        return Blas("none", "cuBLAS")
    return load(SYSTEM_LIBRARY, "system") or _from_wheel(cache_folder() / "blas")


def load(library: str, source: str) -> Blas | None:
    """Load ``library`` with global symbols; None if it is absent or is not OpenBLAS."""
    try:
        handle = ctypes.CDLL(library, mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        describe, core = handle.openblas_get_config, handle.openblas_get_corename
        threads = handle.openblas_get_num_threads
    except (OSError, AttributeError):
        return None
    describe.restype = core.restype = ctypes.c_char_p
    match = re.search(r"OpenBLAS ([\w.]+)", _text(describe()))
    version = match[1] if match else None
    return Blas(source, "OpenBLAS", version, library, int(threads()), _text(core()))


def _text(value: bytes | None) -> str:
    return (value or b"").decode("ascii", "replace")


def unprefixed_copy(library: Path, version: str, folder: Path) -> Path:
    """A copy of the wheel's library whose symbols lost the ``scipy_`` prefix.

    Made once per library version in ``folder`` and published by rename: several processes may
    race, and a killed one leaves only a temporary folder of its own. Raises OSError or
    subprocess.SubprocessError.
    """
    size = library.stat().st_size
    target = folder / f"libopenblas-{version}-{platform.machine()}-{size}.so"
    # Loading a file that was cut short kills the process; patchelf only lets it grow.
    if target.exists() and target.stat().st_size >= size:
        return target
    private_folder(folder)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as work:
        copy, names = Path(work) / "copy.so", Path(work) / "names"
        shutil.copyfile(library, copy)
        found = set(re.findall(rb"(?<=\0)scipy_(\w+)(?=\0)", library.read_bytes()))
        names.write_bytes(b"".join(PREFIX + name + b" " + name + b"\n" for name in sorted(found)))
        subprocess.run(
            [_patchelf(), "--rename-dynamic-symbols", str(names), str(copy)],
            check=True,
            capture_output=True,
            timeout=120,
        )
        with copy.open("rb") as made:
            os.fsync(made.fileno())  # rename before data: else holes after a power loss
        copy.replace(target)
    return target


def _from_wheel(folder: Path) -> Blas:
    spec = importlib.util.find_spec(WHEEL_MODULE)
    if spec is None or not spec.submodule_search_locations:
        return Blas("bundled", "reference", note=f"neither {SYSTEM_LIBRARY} nor {WHEEL} is here")
    library = Path(spec.submodule_search_locations[0]) / "lib" / WHEEL_LIBRARY
    try:
        copy = unprefixed_copy(library, importlib.metadata.version(WHEEL), folder)
    except (OSError, subprocess.SubprocessError, importlib.metadata.PackageNotFoundError) as error:
        return Blas("bundled", "reference", note=f"{WHEEL} could not be prepared: {error}")
    loaded = load(str(copy), "wheel")
    if loaded is None:
        copy.unlink(missing_ok=True)  # cut short by a power loss: made again next time
        return Blas("bundled", "reference", note=f"{copy} could not be loaded")
    return loaded


def _patchelf() -> str:
    """The ``patchelf`` of this environment, else of the path."""
    beside = Path(sys.executable).parent / "patchelf"
    found = str(beside) if beside.exists() else shutil.which("patchelf")
    if found is None:
        raise FileNotFoundError("patchelf is not installed")
    return found


def _has_cuda() -> bool:
    return any(_installed(f"mlx-cuda-{version}") for version in (12, 13))


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
