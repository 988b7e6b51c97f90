"""Keys: shown once, kept as hashes, ended at once, with one cache salt a tenant."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import replace
from pathlib import Path

import pytest

import kvdb
from kvdb.clock import Environment
from kvdb.errors import StoreMissing, UsageError
from kvdb.keys import KEY, USE_SECONDS, Keyring, create_key, list_keys, revoke_key
from kvdb.opening import Options, open_store
from kvdb.store import Store


def test_a_key_is_kept_as_a_salted_hash_only(store: Store) -> None:
    new = create_key(store, "main", name="laptop")
    match = KEY.fullmatch(new.text)
    assert match is not None
    secret = match[2].encode()
    ((hash_salt, kept),) = store.sql("SELECT hash_salt, hash FROM keys").rows
    assert kept == hmac.new(hash_salt, secret, hashlib.sha256).digest()
    assert "secret" not in repr(new.key)
    store.flush()
    for file in store.path.rglob("*"):
        if file.is_file():
            assert secret not in file.read_bytes()
    assert list_keys(store) == [new.key]


def test_only_the_whole_key_is_found(store: Store) -> None:
    ring = Keyring(store)
    assert not ring.any()
    first, second = create_key(store, "main"), create_key(store, "admin")
    assert ring.any()
    assert ring.find(first.text) == first.key
    swapped = first.text.replace("kvdb_1_", "kvdb_2_")
    changed = first.text[:-1] + ("A" if first.text[-1] != "A" else "B")
    for wrong in (
        "",
        "kvdb_1_",
        swapped,
        changed,
        first.text + "A",
        first.text[:-1],
        "kvdb_9_" + 43 * "A",
        first.text.replace("_1_", "_01_"),
        first.text.replace("_1_", "_١_"),
        "\0",
        second.text + "\n",
    ):
        assert ring.find(wrong) is None, wrong


def test_a_revoked_key_ends_at_once_and_for_good(path: Path) -> None:
    with kvdb.open(path) as store, kvdb.open(path) as other:
        ring = Keyring(store)
        new = create_key(other, "tenant", tenant="a")
        assert ring.find(new.text) == new.key
        revoked = revoke_key(other, new.key.id)
        assert ring.find(new.text) is None
        assert not ring.any()
        assert revoke_key(other, new.key.id).revoked_at == revoked.revoked_at
        with pytest.raises(StoreMissing, match="no key 7"):
            revoke_key(other, 7)
    assert (path / "index.backup").exists()
    with kvdb.open(path) as store:
        again = create_key(store, "main")
        revoke_key(store, again.key.id)
    # The index is lost: the backup, older than a revocation unless it is renewed, must do.
    for file in path.glob("index.sqlite*"):
        file.unlink()
    kvdb.rebuild(path)
    with kvdb.open(path) as store:
        keys = list_keys(store)
        assert [key.id for key in keys] == [1, 2]
        assert all(key.revoked_at for key in keys)


def test_a_tenants_keys_have_one_salt_and_no_other_tenant_has_it(store: Store) -> None:
    a, again, b = (create_key(store, "tenant", tenant=name).key for name in ("a", "a", "b"))
    shared = create_key(store, "tenant", tenant="a", shared=True).key
    assert len(a.cache_salt) == 32
    assert again.cache_salt == a.cache_salt != b.cache_salt
    assert shared.cache_salt == b""
    revoke_key(store, a.id)
    assert create_key(store, "tenant", tenant="a").key.cache_salt == a.cache_salt


@pytest.mark.parametrize(
    ("role", "options"),
    [
        ("root", {}),
        ("tenant", {}),
        ("main", {"tenant": "a"}),
        ("admin", {"shared": True}),
        ("main", {"name": "a\nb"}),
        ("tenant", {"tenant": "x" * 201}),
        ("tenant", {"tenant": "anonymous"}),
    ],
)
def test_a_key_that_means_nothing_is_refused(
    store: Store, role: str, options: dict[str, str]
) -> None:
    with pytest.raises(UsageError):
        create_key(store, role, **options)  # type: ignore[arg-type]
    assert list_keys(store) == []


def test_uses_are_written_in_batches(path: Path) -> None:
    clock = [100.0]
    environment = Environment(now_us=lambda: int(clock[0] * 1e6), seconds=lambda: clock[0])
    with open_store(path, Options(), environment=environment) as store:
        ring = Keyring(store)
        new = create_key(store, "main")

        def last_use() -> int | None:
            store.flush()
            return list_keys(store)[0].last_used_at

        assert last_use() is None
        ring.find(new.text)
        assert last_use() == 100_000_000
        clock[0] += USE_SECONDS - 1
        ring.find(new.text)
        assert last_use() == 100_000_000
        clock[0] += 2
        ring.find(new.text)
        assert last_use() == int(clock[0] * 1e6)
        clock[0] += 1
        ring.find(new.text)
        ring.flush()
        assert last_use() == int(clock[0] * 1e6)
        ring.find(new.text[:-2] + "xx")
        ring.flush()
        assert last_use() == int(clock[0] * 1e6)


def test_a_read_only_store_still_knows_its_keys(path: Path) -> None:
    with kvdb.open(path) as store:
        new = create_key(store, "main")
    with kvdb.open(path, read_only=True) as store:
        assert Keyring(store).find(new.text) == replace(new.key)


def test_keys_read_as_one_word() -> None:
    assert re.fullmatch(KEY, "kvdb_12_" + "a" * 43)
