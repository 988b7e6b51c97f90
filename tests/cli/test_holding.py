"""compact, pin, unpin, sequences: what is held stays, and what is said is so."""

from __future__ import annotations

import json
from pathlib import Path

import kvdb
from tests.cli.conftest import Run
from tests.support import BLOCK, check_prefix, open_namespace, put_all, random_tokens, shard_files


def listed(run: Run) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(run("sequences", "list").stdout)
    return rows


def test_a_pinned_block_survives_eviction_until_it_is_unpinned(run: Run, filled: Path) -> None:
    blocks = json.loads(run("ls", "blocks").stdout)
    tip = max(blocks, key=lambda block: block["depth"])["hash"]
    assert run("pin", tip[:12], "--name", "agent").returncode == 0
    assert [row["name"] for row in listed(run)] == ["agent"]
    assert len(json.loads(run("sequences", "show", "agent").stdout)) == 5
    assert run("evict", "--to", "0", "--yes").returncode == 0
    with kvdb.open(filled) as store:
        assert check_prefix(store, open_namespace(store), random_tokens(1, 70)) == 70
        assert check_prefix(store, open_namespace(store), random_tokens(2, 16)) == 0
    assert run("unpin", "agent").returncode == 0
    assert run("evict", "--to", "0", "--yes").returncode == 0
    assert json.loads(run("ls", "blocks").stdout) == []


def test_a_fork_holds_what_its_source_held(run: Run, filled: Path) -> None:
    tip = json.loads(run("ls", "blocks").stdout)[0]["hash"]
    run("pin", tip, "--name", "first")
    assert run("sequences", "fork", "first", "second").returncode == 0
    assert run("sequences", "drop", "first").returncode == 0
    assert [(row["name"], row["tip"]) for row in listed(run)] == [("second", tip)]


def test_wrong_names_and_hashes_are_said_and_change_nothing(run: Run, filled: Path) -> None:
    for arguments, code in (
        (("pin", "zz"), 10),
        (("pin", ""), 2),
        (("unpin", "nobody"), 10),
        (("sequences", "drop", "nobody"), 10),
        (("sequences", "fork", "nobody", "x"), 10),
        (("sequences", "show", "nobody"), 10),
        (("sequences", "destroy"), 2),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert "Traceback" not in done.stderr
    assert listed(run) == []


def test_names_hold_at_most_half_of_the_limit(run: Run, path: Path) -> None:
    with kvdb.open(path, max_bytes=16 << 20, min_free_bytes=0) as store:
        namespace = open_namespace(store)
        put_all(store, namespace, random_tokens(1, BLOCK))
        with store.database.write() as connection:
            connection.execute("UPDATE parts SET nbytes = 9000000 WHERE part = 'kv:0'")
    tip = json.loads(run("ls", "blocks").stdout)[0]["hash"]
    done = run("pin", tip, KVDB_MIN_FREE_BYTES="0")
    assert done.returncode == 1
    assert "more than" in done.stderr
    assert listed(run) == []


def test_compact_joins_small_shards(run: Run, path: Path) -> None:
    tokens = random_tokens(1, 9 * BLOCK)
    with kvdb.open(path, min_free_bytes=0) as store:
        namespace = open_namespace(store)
        for end in range(BLOCK, 10 * BLOCK, BLOCK):
            put_all(store, namespace, tokens[:end])
    report = json.loads(run("compact", "--json").stdout)
    assert (report["shards_read"], report["shards_written"]) == (9, 1)
    assert len(shard_files(path)) == 1


def test_a_quota_is_set_kept_to_and_lifted(run: Run, filled: Path) -> None:
    """Kind: foreign blocks outside the quota (omlx#2115)."""
    (namespace,) = json.loads(run("ls", "namespaces").stdout)
    assert json.loads(run("quota").stdout) == []
    done = run("quota", "--namespace", str(namespace["id"]), "--set", str(namespace["live_bytes"]))
    assert done.returncode == 0
    assert run("quota", "--tenant", "team \N{ROCKET}", "--set", "10MB").returncode == 0
    rows = {row["kind"]: row for row in json.loads(run("quota").stdout)}
    assert rows["namespace"]["live_bytes"] == rows["namespace"]["quota_bytes"]
    assert (rows["tenant"]["name"], rows["tenant"]["quota_bytes"]) == ("team \N{ROCKET}", 10**7)
    with kvdb.open(filled) as store:
        put_all(store, open_namespace(store), random_tokens(9, BLOCK))
    (namespace,) = json.loads(run("ls", "namespaces").stdout)
    assert namespace["live_bytes"] <= rows["namespace"]["quota_bytes"]
    (reason,) = json.loads(run("query", "SELECT DISTINCT reason FROM evictions").stdout)
    assert reason == {"reason": "quota"}
    assert run("quota", "--namespace", str(namespace["id"]), "--lift").returncode == 0
    assert [row["kind"] for row in json.loads(run("quota").stdout)] == ["tenant"]
    for arguments, code in (
        (("--set", "1GB"), 2),
        (("--tenant", "a", "--namespace", "1", "--lift"), 2),
        (("--tenant", "a"), 2),
        (("--tenant", "a", "--set", "-1"), 2),
        (("--namespace", "999", "--lift"), 10),
    ):
        assert run("quota", *arguments).returncode == code
