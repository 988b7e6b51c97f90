"""Encrypted remotes: readable with the right key, and never a plain object for a sealed one."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pyrage
import pytest

import kvdb
from kvdb.errors import UsageError
from kvdb.remotes.registry import open_remote
from kvdb.remotes.remote import Get, Put, Remote, RemoteConfig, RemoteRefused
from kvdb.remotes.sealed import KEY_OBJECT
from kvdb.store import Store
from tests.snapshots.world import blocks, fill

OPEN = "open sesame"
# An age identity under that passphrase.
OPEN_KEY = (
    "YWdlLWVuY3J5cHRpb24ub3JnL3YxCi0+IHNjcnlwdCBkbElvdCtvZVQzbzJvL1BvdWQvbFBnIDQKc3dSUXQxWHgz"
    "SXcwUFJMbThCM2Y1OWhaTHd0MzlGMFpQbS92dnM2bm55RQotLS0gbGhrZVZZb0Nya1c4bTZFamdVdTJLR3NHZExa"
    "Q2l3ZFc4RlJNeElsc1JJbwqFAcQmmvOGc6tYS97f2Nz+lsOT9t96UY5Mc8DLkdXSJkbTvVFdoqB+tkle4jcucwNz"
    "Zi9u8K7lbbbUH+4yS62jk9v4cHEUy7LUNIAj0cYoyTKRIISzzOzHSsUswVLajpO+rp1Zg5QMn2Ch"
)
KEYS = [f"v1/{'ab' * 32}/{number:06x}-{number:064x}" for number in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "nas"
    made.mkdir()
    return made


def identity_file(path: Path) -> tuple[Path, str]:
    """A new identity's file, and its recipient."""
    identity = pyrage.x25519.Identity.generate()
    path.write_text(f"# a key\n{identity}\n")
    return path, str(identity.to_public())


def sealed(folder: Path, encrypt: str, **secrets: Any) -> Remote:
    secrets = {name: str(value) for name, value in secrets.items()}
    return open_remote(RemoteConfig("team", folder.as_uri(), {"encrypt": encrypt}, secrets))


def plain(folder: Path) -> Remote:
    return open_remote(RemoteConfig("team", folder.as_uri()))


def get(remote: Remote, key: str, room: int = 1 << 20) -> bytes | str | None:
    buffer = bytearray(room)
    (got,) = remote.get_many([Get(key, memoryview(buffer))])
    return got.problem if got.nbytes is None else bytes(buffer[: got.nbytes])


def put(remote: Remote, key: str, data: bytes) -> str:
    return remote.put_many([Put(key, [memoryview(data)])])[0]


def test_recipients(tmp_path: Path, folder: Path) -> None:
    mine, recipient = identity_file(tmp_path / "mine")
    other, _ = identity_file(tmp_path / "other")
    data = os.urandom(300_000)
    remote = sealed(folder, f'["{recipient}"]', identity=mine)
    assert put(remote, KEYS[0], data) == "stored"
    assert put(remote, KEYS[0], b"again") == "present"
    assert get(remote, KEYS[0], len(data)) == data  # the buffer need not hold what travels
    assert get(remote, KEYS[0], len(data) - 1) == "too large"
    assert get(remote, KEYS[1]) is None
    assert [listed.key for listed in remote.list("v1/")] == [KEYS[0]]
    assert data[:100] not in next(folder.rglob("0000*")).read_bytes()

    wrong = sealed(folder, f'["{recipient}"]', identity=other)
    assert get(wrong, KEYS[0]) == "encrypted for another key"
    with pytest.raises(RemoteRefused, match="KVDB_REMOTE_TEAM_IDENTITY"):
        get(sealed(folder, f'["{recipient}"]'), KEYS[0])  # who only writes needs none

    put(plain(folder), KEYS[2], data)
    assert get(remote, KEYS[2]) == "not encrypted"
    stored = next(folder.rglob("0000*"))
    stored.write_bytes(stored.read_bytes()[:-1])
    assert get(remote, KEYS[0]) == "does not decrypt"


def test_a_passphrase(folder: Path) -> None:
    """The key that is there is used; it was made by another program, with little work."""
    put(plain(folder), KEY_OBJECT, base64.b64decode(OPEN_KEY))
    remote = sealed(folder, "passphrase", passphrase=OPEN)
    assert get(remote, KEYS[0]) is None
    assert put(remote, KEYS[0], b"secret") == "stored"
    again = sealed(folder, "passphrase", passphrase=OPEN)
    assert get(again, KEYS[0]) == b"secret"
    assert KEY_OBJECT not in [listed.key for listed in remote.list("v1/")]
    with pytest.raises(RemoteRefused, match="another passphrase than KVDB_REMOTE_TEAM_PASSPHRASE"):
        get(sealed(folder, "passphrase", passphrase=OPEN + "!"), KEYS[0])
    put(plain(folder), KEYS[2], b"plain")
    assert get(remote, KEYS[2]) == "not encrypted"
    next(folder.rglob("key.age")).unlink()
    with pytest.raises(RemoteRefused, match="not there"):
        get(sealed(folder, "passphrase", passphrase=OPEN), KEYS[0])


def test_who_puts_first_makes_the_key(folder: Path) -> None:
    remote = sealed(folder, "passphrase", passphrase=OPEN)
    assert get(remote, KEYS[0]) is None
    assert not list(folder.rglob("key.age"))  # asking makes none
    put(remote, KEYS[0], b"secret")
    assert (
        next(folder.rglob("key.age")).read_bytes().startswith(b"age-encryption.org/v1\n-> scrypt")
    )
    assert get(remote, KEYS[0]) == b"secret"


def test_wrong_options(tmp_path: Path, folder: Path) -> None:
    for encrypt, secrets, said in (
        ("passphrase", {}, "KVDB_REMOTE_TEAM_PASSPHRASE"),
        ('["nobody"]', {}, "no age recipient"),
        ("[]", {}, "--encrypt"),
        ("[[[", {}, "--encrypt"),
        ('["age1x"]', {"identity": tmp_path / "missing"}, "KVDB_REMOTE_TEAM_IDENTITY"),
    ):
        with pytest.raises(UsageError, match=said):
            sealed(folder, encrypt, **secrets)


def test_a_store_shares_through_it(
    store: Store, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, recipient = identity_file(tmp_path / "mine")
    other, _ = identity_file(tmp_path / "other")
    monkeypatch.setenv("KVDB_REMOTE_TEAM_IDENTITY", str(mine))
    options = {"encrypt": f'["{recipient}"]'}
    fill(store)
    store.add_remote("team", folder.as_uri(), options=options)
    store.push("team")
    with kvdb.open(tmp_path / "b", min_free_bytes=0) as b:
        assert b.pull(folder.as_uri()).came_to_nothing  # encrypted, and nobody said so
        b.add_remote("team", folder.as_uri(), options=options)
        monkeypatch.setenv("KVDB_REMOTE_TEAM_IDENTITY", str(other))
        wrong = b.pull("team")
        assert wrong.came_to_nothing
        assert set(wrong.named.values()) == {"encrypted for another key"}
        monkeypatch.setenv("KVDB_REMOTE_TEAM_IDENTITY", str(mine))
        assert b.pull("team").stored == 14
        assert blocks(b) == blocks(store)
    assert str(mine) not in str(store.sql("SELECT * FROM remotes").rows)
