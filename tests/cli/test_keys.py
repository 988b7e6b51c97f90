"""kvdb keys: a key is printed once and never again."""

from __future__ import annotations

import json
from pathlib import Path

import kvdb
from kvdb.keys import Keyring
from tests.cli.conftest import Run, one_sentence


def test_keys_are_made_listed_and_revoked(run: Run, path: Path) -> None:
    main = run("keys", "create", "main", "--name", "laptop")
    tenant = run("keys", "create", "tenant", "--tenant", "a", "--shared")
    assert (main.returncode, tenant.returncode) == (0, 0)
    assert main.stdout.strip() not in main.stderr
    listed = run("keys", "list")
    rows = json.loads(listed.stdout)
    assert [(r["id"], r["role"], r["tenant"], r["name"], r["shared"]) for r in rows] == [
        (1, "main", "", "laptop", 0),
        (2, "tenant", "a", "", 1),
    ]
    assert main.stdout.strip().split("_")[2] not in listed.stdout
    assert json.loads(run("keys").stdout) == rows
    with kvdb.open(path, read_only=True) as store:
        assert Keyring(store).find(main.stdout.strip())
    assert run("keys", "revoke", "1").returncode == 0
    with kvdb.open(path, read_only=True) as store:
        assert Keyring(store).find(main.stdout.strip()) is None


def test_wrong_use_is_said_in_one_sentence(run: Run) -> None:
    for arguments, code in (
        (("create", "tenant"), 2),
        (("create", "main", "--tenant", "a"), 2),
        (("create", "root"), 2),
        (("revoke", "7"), 10),
        (("revoke", "x"), 2),
    ):
        done = run("keys", *arguments)
        assert done.returncode == code, done
        assert one_sentence(done)
