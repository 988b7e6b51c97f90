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
        ("serve = 1", "serve"),
        ("[serve]\nprot = 1", "serve.prot"),
        ("[serve]\nport = 70000", "65535"),
        ("[serve]\nno_auth = 2", "true or false"),
        ("[serve]\ntemp = nan", "number"),
        ("[serve]\ncors_origins = [1]", "texts"),
        ('[models."m"]\nport = 1', "port of"),
        ('[models."m"]\nkv_bits = "x"', "kv_bits"),
        ('[models]\n"m" = 1', "table"),
        ("block_tokens = ", "TOML"),
    ],
)
def test_a_mistake_in_the_file_is_an_error(folder: Path, text: str, word: str) -> None:
    (folder / "kvdb.toml").write_text(text)
    with pytest.raises(UsageError, match=word) as caught:
        config.load(environment={}, folder=folder)
    assert str(folder / "kvdb.toml") in str(caught.value)


def test_serving_has_a_table_and_variables_of_its_own(folder: Path) -> None:
    (folder / "kvdb.toml").write_text(
        '[serve]\nport = 1234\nmax_waiting = 3\ncors_origins = ["http://a"]\n'
    )
    environment = {"KVDB_SERVE_MAX_WAITING": "5", "KVDB_SERVE_ALLOWED_HOSTS": "a, b"}
    settings = config.load({"serve.host": "::1"}, environment=environment, folder=folder)
    assert settings.all["serve.host"].origin == "flag --host"
    assert (settings["serve.port"], settings["serve.cors_origins"]) == (1234, ("http://a",))
    assert settings["serve.max_waiting"] == 5
    assert settings["serve.allowed_hosts"] == ("a", "b")
    assert settings["serve.no_auth"] is False


def test_a_models_section_holds_where_nobody_set_it_for_all(folder: Path) -> None:
    (folder / "kvdb.toml").write_text(
        'reuse = "exact"\n[serve]\ntemp = 0.5\n[models]\nfolder = "/pulled"\n'
        '[models."a/b"]\ntemp = 0.9\nkv_bits = 8\nreuse = "max"\ntop_k = 7\nblock_tokens = 64\n'
    )
    settings = config.load(
        {"serve.top_k": 9}, environment={"KVDB_BLOCK_TOKENS": "32"}, folder=folder
    )
    found = {key: value.value for key, value in settings.for_model("a/b").items()}
    # flag > environment > kvdb.toml > section > default
    assert (found["top_k"], found["block_tokens"]) == (9, 32)
    assert (found["temp"], found["reuse"], found["kv_bits"]) == (0.5, "exact", 8)
    assert found["max_tokens"] == 4096
    assert settings.for_model("a/b")["kv_bits"].origin.startswith('[models."a/b"] in ')
    assert settings.for_model("other")["kv_bits"].value is None
    assert settings["models"] == Path("/pulled")
    assert settings["block_tokens"] == 32


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVDB_STOER", "x"),
        ("KVDB_SERVE_STOER", "x"),
        ("KVDB_SERVE_PORT", "-1"),
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
