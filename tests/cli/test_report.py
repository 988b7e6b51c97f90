"""``kvdb report``: the whole page or nothing, in a file that is meant for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run, one_sentence


def test_it_writes_the_page(run: Run, filled: Path, tmp_path: Path) -> None:
    done = run("report")
    file = tmp_path / "kvdb-report.html"
    assert (done.returncode, done.stdout) == (0, "")
    assert str(filled) in file.read_text("utf-8")
    assert file.stat().st_mode & 0o077 == 0
    again = run("report", "-", "--no-text", "--since", "7d", "--tenant", "nobody")
    assert again.stdout.startswith("<!DOCTYPE html>")
    assert "only tenant nobody" in again.stdout


def test_it_replaces_nothing_else(run: Run, filled: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    done = run("report", notes)
    assert (done.returncode, notes.read_text()) == (2, "mine")
    assert "must end in .html" in one_sentence(done)
    done = run("report", tmp_path / "nowhere" / "page.html")
    assert done.returncode == 1
    one_sentence(done)
    assert run("report", "--since", "yesterday").returncode == 2
    done = run("report", "--namespace", 99)
    assert (done.returncode, "no namespace 99" in one_sentence(done)) == (2, True)
    assert run("report", "--store", tmp_path / "none").returncode == 10


def test_a_failure_leaves_the_old_page(
    run: Run, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "page.html"
    file.write_text("old")
    # A text that cannot be written fails after the temporary file was made.
    monkeypatch.setattr("kvdb.report.make.render", lambda _: "\ud800")
    with pytest.raises(UnicodeEncodeError):
        run("report", file)
    assert [path.name for path in tmp_path.iterdir() if "page" in path.name] == ["page.html"]
    assert file.read_text() == "old"
