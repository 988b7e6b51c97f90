"""The notebooks run as they stand, draw, and are kept without their outputs."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from engine.folders import models_folder

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 120


@pytest.fixture(scope="module")
def executed() -> Iterator[dict[str, Any]]:
    """All notebooks, run side by side by this Python: name → notebook, or what stopped it."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        # Nothing of the user's Jupyter is used, and nothing is left in their folders.
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, folder)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("TMPDIR", folder)
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        results = asyncio.run(_execute_all())
        yield dict(zip((path.stem for path in NOTEBOOKS), results, strict=True))


async def _execute_all() -> list[Any]:
    return await asyncio.gather(*map(_execute, NOTEBOOKS), return_exceptions=True)


async def _execute(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_manager_class=AsyncKernelManager,
        resources={"metadata": {"path": str(path.parent)}},
    )
    return await client.async_execute()


@pytest.mark.model
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(path: Path, executed: dict[str, Any]) -> None:
    if path.stem.startswith("02") and not (models_folder() / "smollm2-135m").is_dir():
        pytest.skip("kvdb models pull smollm2-135m")
    notebook = executed[path.stem]
    if isinstance(notebook, Exception):
        raise notebook
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), cell.source
        assert cell.get("execution_count") is None, cell.source
