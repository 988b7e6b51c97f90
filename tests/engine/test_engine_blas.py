"""The BLAS that MLX gets on a Linux CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import blas

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux CPUs need another BLAS")
wheel = pytest.mark.skipif(
    blas.importlib.util.find_spec(blas.WHEEL_MODULE) is None,
    reason="scipy-openblas32 is not installed",
)


def in_new_process(code: str, cache: Path, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "KVDB_CACHE": str(cache), **environment},
    ).stdout.strip()


def test_the_answer_is_remembered() -> None:
    assert blas.preload() is blas.preload()


@linux
def test_it_is_openblas_with_version_and_threads() -> None:
    found = blas.preload()
    assert found.source in ("system", "wheel")
    assert found.name == "OpenBLAS"
    assert found.version
    assert found.threads
    assert found.threads >= 1


@linux
@wheel
def test_mlx_computes_with_the_wheels_library(tmp_path: Path) -> None:
    """The symbols that MLX's library binds must be the preloaded ones."""
    code = """
import ctypes, time
from engine import blas
blas.SYSTEM_LIBRARY = "no such library"
found = blas.preload()
import mlx.core as mx
a = mx.random.normal((64, 64))
mx.eval(a @ a)
here = ctypes.CDLL(None)
address = ctypes.cast(here.cblas_sgemm, ctypes.c_void_p).value
for line in open("/proc/self/maps"):
    low, high = (int(x, 16) for x in line.split()[0].split("-"))
    if low <= address < high:
        print(found.source, line.split()[-1] == found.path)
"""
    assert in_new_process(code, tmp_path) == "wheel True"
    assert in_new_process(code, tmp_path) == "wheel True"
    assert len(list((tmp_path / "blas").iterdir())) == 1


@linux
@wheel
def test_a_copy_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    code = (
        "from engine import blas; blas.SYSTEM_LIBRARY = 'no such library'; "
        "print(blas.preload().source)"
    )
    assert in_new_process(code, tmp_path) == "wheel"
    (copy,) = (tmp_path / "blas").iterdir()
    copy.write_bytes(copy.read_bytes()[:4096])
    assert in_new_process(code, tmp_path) == "wheel"


@linux
def test_without_a_usable_cache_folder_it_is_slow_not_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = (
        "from engine import blas; blas.SYSTEM_LIBRARY = 'no such library'; "
        "found = blas.preload(); import mlx.core as mx; mx.eval(mx.ones((8, 8)) @ mx.ones(8)); "
        "print(found.source, bool(found.note))"
    )
    assert in_new_process(code, tmp_path / "file" / "x") == "bundled True"


@linux
def test_too_late_is_said(tmp_path: Path) -> None:
    code = "import mlx.core; from engine import blas; print(blas.preload().note)"
    assert "before" in in_new_process(code, tmp_path)
