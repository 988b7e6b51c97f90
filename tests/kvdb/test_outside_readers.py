"""The index is readable by other SQLite tools, from another process, while a writer runs.

DuckDB reads SQLite files through an extension that it downloads at run time, so it is not here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvdb
from kvdb.history import RequestRecord
from tests.support import BLOCK, open_namespace, put_all, random_tokens

VIEWS = (
    "block_usage",
    "capacity",
    "hit_history",
    "hourly_hits",
    "miss_reasons",
    "missed_prefixes",
    "prefix_tree",
    "savings",
    "sequence_blocks",
    "tenant_usage",
)
PLAIN_SQLITE = """
import json, sqlite3, sys
connection = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
found = {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in sys.argv[2:]}
print(json.dumps({name: len(rows) for name, rows in found.items()}))
"""
DATASETTE = """
import asyncio, json, sys
from datasette.app import Datasette

async def main():
    site = Datasette([sys.argv[1]])
    found = {}
    for name in (*sys.argv[2:], "requests", "blocks"):
        page = await site.client.get(f"/index/{name}")
        assert page.status_code == 200, page.text
        rows = await site.client.get(f"/index/{name}.json?_shape=array&_size=max")
        found[name] = len(rows.json())
    print(json.dumps(found))

asyncio.run(main())
"""
SQLITE_UTILS = """
import json, sys
from sqlite_utils import Database
database = Database(sys.argv[1])
assert set(sys.argv[2:]) <= set(database.view_names())
print(json.dumps({name: sum(1 for _ in database[name].rows) for name in sys.argv[2:]}))
"""


@pytest.mark.parametrize("code", [PLAIN_SQLITE, SQLITE_UTILS, DATASETTE])
def test_other_tools_read_while_a_writer_runs(path: Path, code: str) -> None:
    with kvdb.open(path) as store:
        namespace = open_namespace(store)
        tokens = random_tokens(0, 3 * BLOCK)
        put_all(store, namespace, tokens)
        store.sequence(namespace, store.match(namespace, tokens).tip_hash, name="agent")
        record = RequestRecord(1, namespace.id, 30, 10, 0, 20, 4, "partial", miss_reason="evicted")
        store.record(record)
        store.flush()
        over, begun, written = threading.Event(), threading.Event(), []

        def write() -> None:
            while not over.is_set():
                put_all(store, namespace, random_tokens(1 + len(written), BLOCK))
                store.record(record)
                written.append(store.flush(30))
                begun.set()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            assert begun.wait(30)
            done = subprocess.run(
                [sys.executable, "-c", code, str(path / "index.sqlite"), *VIEWS],
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            over.set()
            writer.join()
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)
        assert all(rows[name] > 0 for name in VIEWS), rows
        assert rows["sequence_blocks"] == 3
        assert len(written) > 1
        assert all(written)
        assert store.verify().problems == []
