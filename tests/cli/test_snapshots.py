"""``kvdb export`` and ``kvdb import``: options, words and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import kvdb
from tests.cli.conftest import Run
from tests.support import open_namespace, put_all, random_tokens

OPEN = {"KVDB_PASSPHRASE": "open sesame"}


def fill(path: Path) -> None:
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        tokens = random_tokens(1, 100)
        put_all(store, namespace, tokens)
        store.sequence(namespace, store.match(namespace, tokens).tip_hash, name="agent")


def test_there_and_in_words(run: Run, tmp_path: Path) -> None:
    fill(tmp_path / "store")
    dry = run("export", "s.tar", "--dry-run", "--json")
    assert json.loads(dry.stdout)["blocks"] == 7
    assert not (tmp_path / "s.tar").exists()
    done = run("export", "s.tar")
    assert (done.returncode, done.stdout) == (0, "")
    assert "Exported 7 blocks and 1 named sequences" in done.stderr
    assert run("export", "s.tar").returncode == 2  # never over a file that is there
    there = ("--store", tmp_path / "there")
    assert run("import", "s.tar", "--dry-run", *there).returncode == 10
    assert run("import", "s.tar", *there).returncode == 0
    again = json.loads(run("import", "s.tar", "--json", *there).stdout)
    assert (again["new"], again["present"]) == (0, 7)
    dry = run("import", "s.tar", "--dry-run", *there)
    assert "7 blocks: 0 would be stored" in dry.stderr
    since = run("export", "more.tar", "--since", "s.tar")
    assert "Exported 0 blocks" in since.stderr
    some = run("export", "some.tar", "--where", "depth <= 2", "--codec", "zstd", "--model", "w")
    assert "Exported 3 blocks" in some.stderr
    assert run("export", "few.tar", "--max-bytes", "80KiB").returncode == 0
    assert (tmp_path / "few.tar").stat().st_size <= 80 << 10


def test_wrong_use_in_one_sentence(run: Run, tmp_path: Path) -> None:
    fill(tmp_path / "store")
    run("export", "s.tar")
    (tmp_path / "bad.tar").write_bytes((tmp_path / "s.tar").read_bytes()[:-600])
    run("export", "secret.tar", "--encrypt", "passphrase", **OPEN)
    run("export", "blind.tar", "--no-tokens")
    for arguments, variables, code in (
        (("import", "missing.tar"), {}, 2),
        (("import", "bad.tar"), {}, 13),
        (("import", "blind.tar"), {}, 13),
        (("import", "secret.tar"), {}, 13),
        (("import", "secret.tar", "--passphrase"), {"KVDB_PASSPHRASE": "wrong"}, 13),
        (("import", "s.tar", "--identity", "s.tar"), {}, 2),
        (("export", "x.tar", "--encrypt", "nobody"), {}, 2),
        (("export", "x.tar", "--codec", "none"), {}, 2),
        (("export", "x.tar", "--sequence", "nobody"), {}, 10),
        (("export", "x.tar", "--where", "nonsense ("), {}, 1),
        (("export", "-", "--json"), {}, 2),
    ):
        done = run(*arguments, **variables)
        assert done.returncode == code, (arguments, done.stderr)
        said = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
        assert len(said) == 1, (arguments, done.stderr)
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "x.tar").exists()
    opened = run("import", "secret.tar", "--passphrase", **OPEN)
    assert "7 were here" in opened.stderr
    assert run("import", "blind.tar", "--trust", "--store", tmp_path / "b").returncode == 0


def test_an_age_recipient(run: Run, tmp_path: Path) -> None:
    import pyrage

    identity = pyrage.x25519.Identity.generate()
    (tmp_path / "key").write_text(f"# a comment\n{identity}\n")
    fill(tmp_path / "store")
    assert run("export", "s.age", "--encrypt", str(identity.to_public())).returncode == 0
    assert run("import", "s.age", "--identity", "key", "--store", "b").returncode == 0
