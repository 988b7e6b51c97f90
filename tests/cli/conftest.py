"""Fixtures: the program as a process, a store with blocks in it, a tiny model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

import kvdb
from engine.folders import models_folder
from kvdb import sandbox
from kvdb.cli import cli
from tests.engine.tiny_model import write_model
from tests.support import open_namespace, put_all, random_tokens

ROOT = Path(__file__).parent.parent.parent
SECONDS = 600

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """This process's environment without the user's settings, and with folders of its own."""
    # One BLAS thread, as other tests may set it, is for tiny models.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVDB_") and name != "OPENBLAS_NUM_THREADS"
    }
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path / "home"),
        "XDG_DATA_HOME": str(tmp_path / "home/data"),
        "XDG_CONFIG_HOME": str(tmp_path / "home/config"),
        "KVDB_CACHE": str(tmp_path / "cache"),
        "KVDB_STORE": str(tmp_path / "store"),
    }


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``kvdb`` in this process, for speed; keywords are variables of its environment."""

    def call(
        *arguments: object, stdin: str | None = None, user: int | None = None, **variables: str
    ) -> Done:
        monkeypatch.chdir(tmp_path)
        # The program sets variables of its own, which must not outlive it.
        with monkeypatch.context() as patch, mock.patch.dict(os.environ):
            # SQLite never raises this limit again: it would hold for all tests that follow.
            patch.setattr(sandbox, "cap_process_memory", lambda nbytes: None)
            for name in [name for name in os.environ if name.startswith("KVDB_")]:
                patch.delenv(name)
            for name, value in {**environment, **variables}.items():
                patch.setenv(name, value)
            with _effective_user(user):
                result = CliRunner().invoke(cli, list(map(str, arguments)), input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(list(map(str, arguments)), result.exit_code, result.stdout, result.stderr)

    return call


@contextmanager
def _effective_user(user: int | None) -> Iterator[None]:
    mine = os.geteuid()
    if user is not None:
        os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(mine)


@pytest.fixture
def spawn(environment: dict[str, str], tmp_path: Path) -> Run:
    """Run ``kvdb`` in a process of its own."""

    def call(
        *arguments: object, stdin: str | None = None, text: bool = True, **variables: str
    ) -> Done:
        return subprocess.run(
            [sys.executable, "-m", "kvdb", *map(str, arguments)],
            env={**environment, **variables},
            cwd=tmp_path,
            input=stdin,
            capture_output=True,
            text=text,
            timeout=SECONDS,
            check=False,
        )

    return call


@pytest.fixture(scope="session")
def filled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "store"
    with kvdb.open(path, min_free_bytes=0) as store:
        namespace = open_namespace(store)
        put_all(store, namespace, random_tokens(1, 70))
        put_all(store, namespace, random_tokens(2, 16))
    return path


@pytest.fixture
def filled(path: Path, filled_once: Path) -> Path:
    """A store with five blocks of two chains, closed; the test's own."""
    return shutil.copytree(filled_once, path)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer llama with a tokenizer of single characters."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def models() -> Path:
    """The folder with SmolLM2-135M: `make test` pulls it before the tests."""
    folder = models_folder()
    if not (folder / "smollm2-135m").is_dir():
        if os.environ.get("CI"):
            pytest.fail("smollm2-135m was not pulled")
        pytest.skip("kvdb models pull smollm2-135m")
    return folder


@pytest.fixture
def read_only(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """Make a folder unwritable until the test ends; root needs a mount for that."""

    def protect(folder: Path) -> None:
        if os.geteuid() != 0:
            folder.chmod(0o500)
            request.addfinalizer(lambda: folder.chmod(0o700))
            return
        if not _mounted_read_only(folder):
            pytest.skip("root writes everywhere, and mounting is not allowed here")
        request.addfinalizer(lambda: subprocess.run(["/bin/umount", str(folder)], check=True))

    return protect


def _mounted_read_only(folder: Path) -> bool:
    mount = ["mount", "--bind", str(folder), str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        return False
    again = ["mount", "-o", "remount,ro,bind", str(folder)]
    if subprocess.run(again, capture_output=True, check=False).returncode != 0:
        subprocess.run(["/bin/umount", str(folder)], check=True)
        return False
    return True


@pytest.fixture
def claimed(filled: Path) -> Iterator[Path]:
    """A store that this process uses, so that nobody gets it alone."""
    with kvdb.open(filled):
        yield filled


def one_sentence(done: Done) -> str:
    """What a failed run said: one sentence on stderr, no traceback."""
    lines = done.stderr.strip().splitlines()
    assert lines, done
    assert lines[-1].startswith("Error: "), done.stderr
    assert lines[-1].endswith("."), done.stderr
    assert "Traceback" not in done.stderr
    if lines[0].startswith("Usage:"):  # click's own words for wrong use
        lines = lines[-1:]
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("Error: ")
