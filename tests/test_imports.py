"""Imports go one way: cli, http → engine → Store → Index + Shards → driver, durable."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SQLITE = {"sqlite3", "pysqlite3", "apsw", "sqlean"}
# The core is numpy and SQLite; these belong to what is built on it.
ABOVE_THE_CORE = {
    "click",
    "engine",
    "huggingface_hub",
    "mlx",
    "mlx_lm",
    "prompt_toolkit",
    "rich",
    "starlette",
    "torch",
    "transformers",
    "uvicorn",
}
# Lower numbers know nothing of higher ones. Modules of kvdb that are not named have level 2.
LEVELS = {
    "kvdb.errors": 0,
    "kvdb.layout": 0,
    "kvdb.identity": 0,
    "kvdb.clock": 0,
    "kvdb.config": 0,
    "kvdb.machine": 0,
    "kvdb.listing": 0,
    "kvdb.codecs": 0,
    "kvdb.driver": 1,
    "kvdb.durable": 1,
    "kvdb.locks": 1,
    "kvdb.store": 3,
    "kvdb.opening": 3,
    "kvdb.check": 3,
    "kvdb": 3,
    "engine": 4,
    "kvdb.cli": 5,
    "kvdb.shell": 5,
    "engine.http": 5,
    "kvdb.__main__": 5,
}
DEFAULT_LEVEL = 2


def modules() -> dict[str, Path]:
    found = {}
    for package in ("kvdb", "engine"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path, *, at_import: bool = False) -> Iterator[str]:
    """Full names imported anywhere in a file, but for type checking; or only when it is loaded."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            yield child
            yield from walk(child)

    for node in walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def level(module: str) -> int | None:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in LEVELS and (name != "kvdb" or length == len(parts)):
            return LEVELS[name]
    return DEFAULT_LEVEL if parts[0] == "kvdb" else None


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_nothing_above_it(module: str) -> None:
    own = level(module)
    assert own is not None
    for name in imports(MODULES[module]):
        other = level(name)
        assert other is None or other <= own, f"{module} (level {own}) imports {name} ({other})"


@pytest.mark.parametrize("module", MODULES)
def test_only_the_driver_imports_sqlite(module: str) -> None:
    roots = {name.split(".")[0] for name in imports(MODULES[module])}
    if module != "kvdb.driver":
        assert not roots & SQLITE


@pytest.mark.parametrize("module", [m for m in MODULES if (level(m) or 0) <= 3])
def test_the_core_imports_nothing_built_on_it(module: str) -> None:
    roots = {name.split(".")[0] for name in imports(MODULES[module])}
    assert not roots & ABOVE_THE_CORE


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph = {
        m: {n for n in imports(p, at_import=True) if n in MODULES and n != m}
        for m, p in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path, module))
        if module not in done:
            for name in graph[module]:
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_a_wrong_import_is_noticed(tmp_path: Path) -> None:
    """The walk sees imports in functions and in from-imports, and skips type checking."""
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "def f():\n    from kvdb import driver\n    import mlx.core\n"
    )
    assert set(imports(file)) == {"typing", "kvdb.driver", "mlx.core"}
    assert set(imports(file, at_import=True)) == {"typing"}
    assert (level("kvdb.cli.demo"), level("kvdb.index"), level("engine.plan")) == (5, 2, 4)


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [
        ("import kvdb; kvdb.open", {"mlx", "mlx_lm", "engine", "click", "sqlite_utils", "torch"}),
        ("import kvdb.cli", {"mlx", "mlx_lm", "engine", "numpy", "sqlite_utils"} | SQLITE),
    ],
)
def test_what_loading_brings_in(program: str, unwanted: set[str]) -> None:
    code = f"{program}; import sys; print(*sys.modules)"
    names = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.split()
    assert not unwanted & set(names)
