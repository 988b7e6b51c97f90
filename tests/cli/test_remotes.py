"""``kvdb remotes``, ``push``, ``pull`` and ``sync``: options, words and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, one_sentence

SECRET = "hunter2"  # noqa: S105 - it must not be seen


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "nas"
    folder.mkdir()
    return folder


def test_there_and_back_in_words(run: Run, filled: Path, there: Path, tmp_path: Path) -> None:
    url = there.as_uri()
    added = run("remotes", "add", "team", url, "--budget-ms", 50)
    assert (added.returncode, added.stderr) == (0, "Added team: it works.\n")
    listed = json.loads(run("remotes").stdout)
    assert (listed[0]["name"], listed[0]["url"], listed[0]["budget_ms"]) == ("team", url, 50)
    checked = json.loads(run("remotes", "check", "team", "--json").stdout)
    assert [step["name"] for step in checked] == ["exists", "put", "get", "list"]
    assert all(step["problem"] is None for step in checked)

    dry = run("push", "team", "--dry-run")
    assert "6 blocks: 8 objects would go there" in dry.stderr
    pushed = run("push", "team")
    assert (pushed.returncode, pushed.stdout) == (0, "")
    assert "6 blocks: 8 objects went there" in pushed.stderr
    assert json.loads(run("push", "team", "--json").stdout)["present"] == 8

    other = ("--store", tmp_path / "other")
    assert run("pull", url, "--dry-run", *other).returncode == 10
    pulled = json.loads(run("pull", url, "--json", *other).stdout)
    assert (pulled["stored"], pulled["rejected"], pulled["stopped"]) == (6, 0, "")
    again = run("pull", url, *other)
    assert (again.returncode, "6 were here" in again.stderr) == (0, True)
    synced = json.loads(run("sync", "team", "--json").stdout)
    assert (synced["push"]["present"], synced["pull"]["present"]) == (8, 6)

    status = json.loads(run("remotes", "status", "--json").stdout)[0]
    assert (status["put"], status["state"], status["last_error"]) == (8, "up", None)
    assert "team" in run("remotes", "status").stdout
    assert run("remotes", "remove", "team").returncode == 0
    assert json.loads(run("remotes", "list").stdout) == []


def test_exit_codes(run: Run, filled: Path, there: Path, tmp_path: Path) -> None:
    run("remotes", "add", "team", there.as_uri())
    run("push", "team")
    for arguments, code in (
        (("remotes", "add", "team", there.as_uri()), 2),
        (("remotes", "add", "b", (tmp_path / "missing").as_uri()), 1),
        (("remotes", "add", "b", there.as_uri(), "--option", "colour=red"), 2),
        (("remotes", "add", "b", there.as_uri(), "--encrypt", "nobody"), 2),
        (("remotes", "add", "b", there.as_uri(), "--encrypt", "passphrase"), 2),
        (("remotes", "add", "b", there.as_uri(), "--no-read", "--no-write"), 2),
        (("remotes", "add", "b", "s3"), 2),
        (("remotes", "remove", "nobody"), 10),
        (("remotes", "check", "nobody"), 10),
        (("push", "nobody"), 10),
        (("pull", "team", "--model", "nobody"), 10),
        (("push", (tmp_path / "missing").as_uri()), 1),
    ):
        done = run(*arguments)
        assert done.returncode == code, (arguments, done.stderr)
        assert one_sentence(done)
    for path in there.rglob("000*"):
        path.write_bytes(path.read_bytes()[:-1])
    bad = run("pull", there.as_uri(), "--json", "--store", tmp_path / "other")
    assert bad.returncode == 3
    assert len(json.loads(bad.stdout)["named"]) >= 2
    healed = run("push", "team", "--verify")
    assert (healed.returncode, "8 of them took the place of bad ones" in healed.stderr) == (0, True)
    assert run("pull", there.as_uri(), "--store", tmp_path / "other").returncode == 0


def test_a_secret_is_nowhere(run: Run, filled: Path, there: Path) -> None:
    """Not in what is said, not in the store, not in an error."""
    secret = {"KVDB_REMOTE_TEAM_PASSWORD": SECRET, "KVDB_REMOTE_TEAM_PASSPHRASE": SECRET}
    said = [
        run("remotes", "add", "team", there.as_uri(), **secret),
        run("remotes", "add", "other", f"redis://me:{SECRET}@localhost:1"),
        run("push", f"redis://me:{SECRET}@localhost:1"),
        run("remotes", "add", "other", "redis://localhost:1", "--option", f"password={SECRET}"),
        run("remotes", "list", **secret),
        run("remotes", "status", "--json", **secret),
        run("query", "SELECT * FROM remotes", **secret),
    ]
    assert [done.returncode for done in said] == [0, 2, 2, 2, 0, 0, 0]
    for done in said:
        assert SECRET not in done.stdout + done.stderr
    for path in filled.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
