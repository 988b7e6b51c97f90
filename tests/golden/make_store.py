"""Make tests/golden/schema_<n>.zip: a small store as this program's schema leaves it.

    python -m tests.golden.make_store

Run once before a release that follows a new migration; what is here is never made anew. The prompt
of seed 1 is held by the sequence "agent", that of seed 2 is evicted. Requests lie in two hours, of
two tenants; one has no namespace and one no tokens.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import kvdb
from kvdb import driver
from tests.support import BLOCK, open_namespace, put_all, random_tokens

HOUR_US = 3600 * 1_000_000
REQUEST = (
    "INSERT INTO requests (started_at, namespace_id, tenant, prompt_tokens, restored_tokens, "
    "refilled_tokens, computed_tokens, generated_tokens, skip, miss_reason, bytes_read, load_ms, "
    "restore_ms, prefill_ms, first_token_ms) VALUES (?, ?, ?, ?, ?, 0, ?, 9, ?, ?, 500, 1, 3, ?, 7)"
)
REQUESTS = (
    (HOUR_US + 5, 1, "a", 100, 60, 40, "partial", "diverged", 80.0),
    (HOUR_US + 6, 1, "a", 100, 100, 0, "full", None, 0.0),
    (2 * HOUR_US, 1, "b", 8, 0, 8, "none", "diverged", 4.0),
    (2 * HOUR_US, None, "", 0, 0, 0, "none", None, None),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        with kvdb.open(path) as store:
            namespace = open_namespace(store)
            tokens = random_tokens(1, 3 * BLOCK)
            put_all(store, namespace, tokens)
            store.sequence(namespace, store.match(namespace, tokens).tip_hash, name="agent")
            put_all(store, namespace, random_tokens(2, BLOCK))
            store.evict(to_bytes=0)
            with store.database.write() as connection:
                connection.executemany(REQUEST, REQUESTS)
                connection.execute("UPDATE settings SET value = '77' WHERE key LIKE 'history%'")
        for name in ("index.backup", "ballast"):
            (path / name).unlink(missing_ok=True)
        target = Path(__file__).parent / f"schema_{driver.latest_version()}"
        shutil.make_archive(str(target), "zip", path)


if __name__ == "__main__":
    main()
