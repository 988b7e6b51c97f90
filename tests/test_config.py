"""Settings: which source wins, and that a mistake is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdb import config
from kvdb.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_flag_wins_over_a_variable_over_a_file_over_the_default(folder: Path) -> None:
    (folder / "kvdb.toml").write_text('durability = "power"\nblock_tokens = 64\nreuse = "exact"\n')
    settings = config.load(
        {"durability": None, "reuse": "max"},
        environment={"KVDB_BLOCK_TOKENS": "128", "PATH": "/bin"},
        folder=folder,
    )
    found = {key: (value.value, value.origin) for key, value in settings.all.items()}
    assert found["reuse"] == ("max", "flag --reuse")
    assert found["block_tokens"] == (128, "KVDB_BLOCK_TOKENS")
    assert found["durability"] == ("power", str(folder / "kvdb.toml"))
    assert found["codec"] == ("raw", "default")
    assert settings["max_bytes"] is None
    assert settings["store"].parts[-2:] == ("kvdb", "store")


def test_the_named_file_wins_over_the_one_in_the_folder(folder: Path) -> None:
    (folder / "kvdb.toml").write_text("block_tokens = 64\n")
    other = folder / "other.toml"
    other.write_text("block_tokens = 32\n")
    settings = config.load(environment={"KVDB_CONFIG": str(other)}, folder=folder)
    assert settings["block_tokens"] == 32


def test_the_users_file_is_found(folder: Path) -> None:
    user = folder / "config/kvdb/kvdb.toml"
    user.parent.mkdir(parents=True)
    user.write_text("block_tokens = 16\n")
    empty = folder / "empty"
    empty.mkdir()
    found = config.config_file({}, empty)
    # The user's config folder is elsewhere on macOS.
    assert found in (user, None)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("block_token = 64", "block_token"),
        ('durability = "eternal"', "durability"),
        ("store = 3", "store"),
        ("max_bytes = true", "max_bytes"),
        ("block_tokens = 1.5", "block_tokens"),
        ("[server]\nport = 1", "server"),
        ("block_tokens = ", "TOML"),
    ],
)
def test_a_mistake_in_the_file_is_an_error(folder: Path, text: str, word: str) -> None:
    (folder / "kvdb.toml").write_text(text)
    with pytest.raises(UsageError, match=word) as caught:
        config.load(environment={}, folder=folder)
    assert str(folder / "kvdb.toml") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVDB_STOER", "x"),
        ("KVDB_REUSE", "most"),
        ("KVDB_MAX_BYTES", "-1"),
        ("KVDB_STORE", ""),
    ],
)
def test_a_mistake_in_the_environment_is_an_error(folder: Path, name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        config.load(environment={name: value}, folder=folder)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        (7, 7),
        ("10GB", 10**10),
        ("512MiB", 512 << 20),
        ("1.5k", 1500),
        ("2 g", 2 * 10**9),
        ("1TiB", 1 << 40),
        ("100b", 100),
    ],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert config.size(text) == nbytes


@pytest.mark.parametrize("text", ["", "lots", "-1", "1 parsec", "1e9", "GB", None, True, 1.5j])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="size"):
        config.size(text)
