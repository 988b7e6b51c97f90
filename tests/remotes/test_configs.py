"""Rows of remotes: what goes in comes out, and no secret ever goes in."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdb import config
from kvdb.errors import StoreMissing, UsageError
from kvdb.remotes.configs import (
    find_spec,
    load_specs,
    named_or_at,
    new_spec,
    remove_spec,
    save_spec,
    secret_variable,
)
from kvdb.remotes.naming import BlockKey, parse_block_key
from kvdb.remotes.registry import SCHEMES, open_remote
from kvdb.remotes.remote import RemoteConfig
from kvdb.remotes.sorting import SortedKeys
from kvdb.store import Store

NAMES = st.from_regex(r"[a-z0-9][a-z0-9-]{0,39}", fullmatch=True)
PLACES = st.text(string.ascii_letters + string.digits + "/._-:", min_size=1, max_size=40)
SECRETS = st.dictionaries(st.sampled_from(config.REMOTE_SECRETS), st.text("abc", min_size=1))


@settings(max_examples=25)
@given(
    names=st.lists(NAMES, min_size=1, max_size=3, unique=True),
    scheme=st.sampled_from(sorted(SCHEMES)),
    place=PLACES,
    options=st.dictionaries(
        st.from_regex(r"x[a-z0-9_]{0,20}", fullmatch=True).filter(
            lambda key: not any(what.replace("_", "") in key for what in ("password", "passphrase"))
        ),
        st.text(string.printable[:95], min_size=1),
        max_size=3,
    ),
    secrets=SECRETS,
)
def test_what_is_saved_is_found(
    tmp_path_factory: pytest.TempPathFactory,
    names: list[str],
    scheme: str,
    place: str,
    options: dict[str, str],
    secrets: dict[str, str],
) -> None:
    """Secrets reach the remote of that name, and settings are read as ever."""
    environment = {secret_variable(names[0], what): text for what, text in secrets.items()}
    config.load(environment=environment, folder=Path("/nonexistent"))
    specs = [
        new_spec(name, f"{scheme}://{place}", options=options, environment=environment)
        for name in names
    ]
    assert specs[0].config.secrets == secrets
    assert all(spec.config.secrets == {} for spec in specs[1:])


def test_rows(store: Store) -> None:
    spec = new_spec("team", "file:///x", options={"timeout": "3"}, writes=False, budget_ms=7)
    saved = save_spec(store, spec)
    assert saved.id > 0
    with pytest.raises(UsageError):
        save_spec(store, spec)
    save_spec(store, new_spec("all", "file:///y"))
    secret = {"KVDB_REMOTE_TEAM_PASSWORD": "hunter2"}
    with store.database.read() as connection:
        assert [each.name for each in load_specs(connection)] == ["all", "team"]
        found = find_spec(connection, "team", secret)
        assert named_or_at(connection, "file:///x").id == saved.id
        assert named_or_at(connection, "file:///z").id == 0
    assert (found.id, found.writes, found.budget_ms) == (saved.id, False, 7)
    assert found.config.options == {"timeout": "3"}
    assert found.config.secrets == {"password": "hunter2"}
    assert "hunter2" not in repr(found)
    remove_spec(store, "team")
    with pytest.raises(StoreMissing):
        remove_spec(store, "team")


SECRET = "hunter2"  # noqa: S105 - it must not be seen


@pytest.mark.parametrize(
    ("name", "url", "options", "said"),
    [
        ("team", f"redis://user:{SECRET}@host", {}, "KVDB_REMOTE_TEAM_PASSWORD"),
        ("team", f"file://user:{SECRET}@host/x", {}, "KVDB_REMOTE_TEAM_PASSWORD"),
        ("my-team", f"redis://:{SECRET}@host", {}, "KVDB_REMOTE_MY_TEAM_PASSWORD"),
        ("team", f"redis://user:{SECRET}/x@host", {}, "KVDB_REMOTE_TEAM_PASSWORD"),
        ("team", f"https://user:{SECRET}@host", {}, "KVDB_REMOTE_TEAM_PASSWORD"),
        ("team", f"az://container?sig={SECRET}", {}, "--option"),
        ("team", f"s3 {SECRET}", {}, "SCHEME"),
        ("team", "s3://b", {"secret_access_key": SECRET}, "KVDB_REMOTE_TEAM_SECRET_ACCESS_KEY"),
        ("team", "s3://b", {"aws_session_token": SECRET}, "KVDB_REMOTE_TEAM_SESSION_TOKEN"),
        ("team", "redis://h", {"password": SECRET}, "KVDB_REMOTE_TEAM_PASSWORD"),
        ("Team", "redis://h", {}, "no name"),
        ("a" * 41, "redis://h", {}, "no name"),
        ("team", "ftp://h", {}, "begins with one of"),
        ("team", "redis://h", {"x": ""}, "KEY=VALUE"),
    ],
)
def test_refused_without_a_word_of_the_secret(
    name: str, url: str, options: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError) as refused:
        new_spec(name, url, options=options)
    assert said in str(refused.value)
    assert SECRET not in str(refused.value)


def test_common_options_are_checked(tmp_path: Path) -> None:
    for options in ({"timeout": "soon"}, {"timeout": "0"}, {"salted": "yes"}, {"colour": "red"}):
        with pytest.raises(UsageError):
            open_remote(RemoteConfig("team", tmp_path.as_uri(), options))
    open_remote(RemoteConfig("t", tmp_path.as_uri(), {"timeout": "2.5", "salted": "true"})).close()


@pytest.mark.parametrize("variable", ["KVDB_REMOTE_TEAM_PASWORD", "KVDB_REMOTES", "KVDB_REMOTE_"])
def test_a_mistyped_variable_is_an_error(variable: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=variable):
        config.load(environment={variable: SECRET}, folder=tmp_path)


KEYS = st.builds(
    BlockKey,
    st.binary(min_size=32, max_size=32),
    st.integers(0, (1 << 24) - 1),
    st.binary(min_size=32, max_size=32),
    st.none() | st.from_regex(r"[a-z]{1,8}(:[0-9]{1,3})?", fullmatch=True),
)


@settings(max_examples=40)
@given(st.lists(st.tuples(KEYS, st.integers(0, 1 << 40)), unique_by=lambda each: each[0]))
def test_keys_come_back_in_order(sized: list[tuple[BlockKey, int]]) -> None:
    """Also when they do not fit into memory at once: parents first, required parts first."""
    keys = SortedKeys(piece_keys=3)
    for key, nbytes in sized:
        assert parse_block_key(str(key)) == key
        keys.add(key, nbytes)
        keys.add(key, nbytes) if nbytes % 2 else None  # a listing may name one twice
    expected = sorted(sized, key=lambda e: (*e[0][:3], e[0].part is not None, e[0].part or ""))
    found = [(each.key, each.nbytes) for each in keys]
    keys.close()
    assert [(k.fingerprint, k.depth, k.hash, k.part is None) for k, _ in found] == [
        (k.fingerprint, k.depth, k.hash, k.part is None) for k, _ in expected
    ]
    assert sorted(found, key=str) == sorted(expected, key=str)
