"""Statements, modes and commands, as the session runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvdb.errors import KvdbError
from kvdb.shell.commands import COMMANDS
from kvdb.shell.session import MODES, Leave, Session
from kvdb.shell.split import Entry


def run(session: Session, shown: list[str], *texts: str) -> str:
    """What was shown for the last of some entries."""
    for text in texts:
        shown.clear()
        session.run(Entry(text, 1))
    return "\n".join(shown)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_shows_rows(session: Session, shown: list[str], mode: str) -> None:
    text = run(session, shown, f".mode {mode}", "SELECT 1 AS id, 'a' AS name UNION SELECT 2, NULL")
    for word in ("id", "name", "1", "a", "2"):
        assert word in text
    if mode == "json":
        assert json.loads(text) == [{"id": 1, "name": "a"}, {"id": 2, "name": None}]
    run(session, shown, "SELECT 1 WHERE 0")  # nothing is no error in any mode


@pytest.mark.parametrize("room", [20, 40, 80, None])
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in (".quit", ".exit")])
def test_every_command_at_every_width(
    session: Session, shown: list[str], tmp_path: Path, name: str, room: int | None
) -> None:
    (hash_,) = session.ask("SELECT hash FROM block_usage LIMIT 1").rows[0]
    arguments = {".block": hash_[:9], ".once": f"{tmp_path}/x", ".miss": "3"}
    session.room = lambda: room
    text = run(session, shown, f"{name} {arguments.get(name, '')}")
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f]", text)
    if room is not None and name not in (".schema", ".help", ".miss"):
        said = {".mode", ".limit", ".timeout", ".timer", ".capacity"}
        assert name in said or max(map(len, text.splitlines()), default=0) <= room


def test_questions_of_the_domain(session: Session, shown: list[str]) -> None:
    session.mode = "json"
    hits = json.loads(run(session, shown, ".hits 3"))
    assert [(row["id"], row["restored"]) for row in hits] == [(4, 64), (3, 0), (2, 32)]
    misses = json.loads(run(session, shown, ".miss"))
    assert [row["id"] for row in misses] == [3, 1, 2]  # by what they cost
    (saved,) = json.loads(run(session, shown, ".savings"))
    assert (saved["requests"], saved["restored"], saved["saved %"]) == (4, 96, 37.5)
    assert saved["seconds saved"] == pytest.approx(96 * 2800 / 160 / 1000, abs=0.001)
    (day,) = json.loads(run(session, shown, ".wear"))
    assert day["shards"] == 2
    run(session, shown, ".capacity")
    (kept,) = json.loads(shown[0])
    assert (kept["blocks"], kept["tokens"]) == (7, 104)
    assert len(json.loads(run(session, shown, ".top 2"))) == 2
    assert "0 of 64 prompt tokens hit" in run(session, shown, ".miss 3")


def test_the_tree_forks_where_prompts_part(session: Session, shown: list[str]) -> None:
    lines = run(session, shown, ".tree").splitlines()
    assert [re.sub("[0-9a-f]{8}", "#", line) for line in lines] == [
        "#, 32 tokens, 2 blocks, 0 hits",
        "├─ #, 32 tokens, 2 blocks, 0 hits",
        "└─ #, 40 tokens, 3 blocks, 0 hits",
    ]
    branch = lines[2].split()[1].rstrip(",")
    assert run(session, shown, f".tree {branch}").startswith(f"{branch}, 40 tokens")


def test_a_block_and_its_parts(session: Session, shown: list[str]) -> None:
    (hash_,) = session.ask("SELECT hash FROM block_usage WHERE depth = 1").rows[0]
    text = run(session, shown, f".block {hash_[:10]}")
    assert hash_ in text
    assert re.search(r"tokens_before +16\n", text)
    assert re.search(r"children +2\n", text)
    assert "kv:" in text
    several = run(session, shown, ".block ''")
    assert "give more of the hash" in several


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (".mis", "did you mean .miss? See .help."),
        (".xyzzy", "see .help"),
        (".block", "It is used so: .block HASH."),
        (".block xyz", "not the beginning of a hash"),
        (".block abcdef0123456789", "No block begins"),
        (".miss 99", "no request 99"),
        (".miss x", "not a request's id"),
        (".top -1", "not a number of rows"),
        (".mode xml", "is not one of table"),
        (".timer maybe", "on or off"),
        (".timeout 0", "seconds above 0"),
        (".schema nowhere", "no table or view"),
        (".once 'open", "no closing quotation"),
        (".hits 1 2", "It is used so"),
        (".help xyz", "no command"),
        ("SELECT :x", "The parameter :x has no value; write the value itself"),
        ("DELETE FROM requests", "kvdb query --write"),
        ("SELECT * FROM nowhere", "No such table"),
    ],
)
def test_errors_are_one_sentence(session: Session, shown: list[str], entry: str, said: str) -> None:
    with pytest.raises(KvdbError) as caught:
        run(session, shown, entry)
    assert said in str(caught.value)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_once_writes_a_new_file_and_only_once(
    session: Session, shown: list[str], tmp_path: Path
) -> None:
    target = tmp_path / "out.csv"
    assert run(session, shown, ".mode csv", f".once {target}", "SELECT 1 AS a, char(27) AS b") == ""
    assert target.read_text() == "a,b\n1,\x1b\n"  # a file gets what is there
    assert run(session, shown, "SELECT 2 AS a") == "a\n2\n"
    with pytest.raises(KvdbError, match="there already"):
        run(session, shown, f".once {target}", "SELECT 3")
    assert target.read_text() == "a,b\n1,\x1b\n"
    with pytest.raises(KvdbError, match="cannot be written"):
        run(session, shown, f".once {tmp_path}/no/where", "SELECT 3")
    assert "3" in run(session, shown, "SELECT 3")  # not stuck with it


def test_limit_timer_and_leaving(session: Session, shown: list[str]) -> None:
    text = run(session, shown, ".limit 2", ".timer on", "SELECT name FROM counters")
    assert "Only the first 2 rows are shown" in text
    assert re.search(r"2 rows in \d+\.\d{3} s", text)
    for entry in (".quit", ".exit"):
        with pytest.raises(Leave):
            run(session, shown, entry)
