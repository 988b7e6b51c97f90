"""Administration, figures and named caches, as a client with the right key sees them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvdb.keys import list_keys
from tests.http.guarded import Guarded, guarded

TOKENS = list(range(2, 72))  # four blocks of 16 and a tail


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVDB_CACHE", str(tmp_path_factory.mktemp("cache")))
        with guarded(tmp_path_factory.mktemp("served")) as started:
            yield started


def ask(server: Guarded, tokens: list[int], key: str = "main") -> dict[str, Any]:
    """The usage of a completion."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 2}
    usage: dict[str, Any] = server.get("POST", "/v1/completions", body, key=key)["usage"]
    assert server.store.flush(30)
    return usage


def cached(server: Guarded, tokens: list[int], key: str = "main") -> int:
    return int(ask(server, tokens, key)["prompt_tokens_details"]["cached_tokens"])


def figures(server: Guarded) -> dict[str, float]:
    text = server.call("GET", "/metrics", key="main").text
    return {
        sample.name + "".join(f",{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_models_come_and_go(server: Guarded) -> None:
    (name,) = server.service.models
    (row,) = server.get("POST", "/v1/kvdb/models/load", {"model": "tiny"}, key="admin")["models"]
    assert (row["name"], row["aliases"]) == (name, ["tiny"])
    assert (row["loaded"], row["pinned"]) == (True, False)
    (row,) = server.get("POST", "/v1/kvdb/models/pin", {"model": "tiny"}, key="admin")["models"]
    assert row["pinned"]
    done = server.get("POST", "/v1/kvdb/models/unload", {"model": "tiny"}, key="admin")
    assert (done["unloaded"], done["models"][0]["loaded"]) == (True, False)
    again = server.get("POST", "/v1/kvdb/models/unload", {"model": "tiny"}, key="admin")
    assert not again["unloaded"]
    other = server.call("POST", "/v1/kvdb/models/load", {"model": "/etc"}, key="admin")
    assert other.status_code == 404


def test_figures_count_what_was_asked(server: Guarded) -> None:
    tokens = [9, *TOKENS]
    before = figures(server)
    first, second = ask(server, tokens), ask(server, tokens)
    (name,) = server.service.models

    def grown(figure: str) -> float:
        return after.get(figure, 0.0) - before.get(figure, 0.0)

    after = figures(server)
    assert grown(f"kvdb_requests_total,{name},length,none") == 1
    assert grown(f"kvdb_requests_total,{name},length,full") == 1
    assert grown(f"kvdb_prompt_tokens_total,{name},computed") == len(tokens)
    assert grown(f"kvdb_prompt_tokens_total,{name},restored") == len(tokens)
    assert grown(f"kvdb_generated_tokens_total,{name}") == 4
    assert grown(f"kvdb_first_token_seconds_count,{name},full") == 1
    assert grown(f"kvdb_prefill_seconds_count,{name}") == 1
    disk, ram = (grown(f"kvdb_read_bytes_total,{source}") for source in ("disk", "ram"))
    assert disk + ram > 0
    assert grown("kvdb_requests_reading_disk_total") == (disk > 0)
    assert 0 <= after["kvdb_disk_read_ratio"] <= 1
    assert after[f"kvdb_running_requests,{name},decode"] == 0
    assert after["kvdb_store_bytes"] <= after["kvdb_store_limit_bytes"]
    assert after["kvdb_store_blocks"] >= 5
    assert first["prompt_tokens"] == second["prompt_tokens"] == len(tokens)
    wrong = server.call("POST", "/v1/completions", {"model": "tiny", "prompt": []}, key="main")
    assert wrong.status_code == 400


def test_a_prompt_is_warmed_and_blocks_evicted(server: Guarded) -> None:
    tokens = [11, *TOKENS]
    warmed = server.get("POST", "/v1/kvdb/warm", {"model": "tiny", "tokens": tokens}, key="admin")
    assert (warmed["tokens"], warmed["lost"], warmed["ram"]) == (len(tokens), 0, True)
    assert cached(server, tokens) == len(tokens)
    plan = server.get("POST", "/v1/kvdb/evict", {"to_bytes": 0, "dry_run": True}, key="admin")
    assert plan["blocks"] > 0
    assert cached(server, tokens) == len(tokens)
    done = server.get("POST", "/v1/kvdb/evict", {"to_bytes": 0}, key="admin")
    assert done["blocks"] >= plan["blocks"]
    assert cached(server, tokens) == 0
    assert server.call("POST", "/v1/kvdb/evict", {}, key="admin").status_code == 400


def test_verifying_is_a_job_with_progress_that_can_be_cancelled(server: Guarded) -> None:
    ask(server, [12, *TOKENS])
    job = wait(server, server.get("POST", "/v1/kvdb/verify", {"data": True}, key="admin")["id"])
    assert (job["state"], job["problems"], job["error"]) == ("done", [], None)
    assert job["done"] == job["total"] == job["checked_shards"] > 0
    # One that is held up where it says how far it is.
    go = threading.Event()
    verify = server.store.verify

    def slow(**options: Any) -> Any:
        progress = options["progress"]

        def held(done: int, total: int) -> None:
            assert go.wait(30)
            progress(done, total)

        return verify(**{**options, "progress": held})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.store, "verify", slow)
        job = server.get("POST", "/v1/kvdb/verify", {}, key="admin")
        assert job["state"] == "running"
        assert server.call("POST", "/v1/kvdb/verify", {}, key="admin").status_code == 400
        server.get("DELETE", f"/v1/kvdb/jobs/{job['id']}", key="admin")
        go.set()
        assert wait(server, job["id"])["state"] == "cancelled"
    listed = server.get("GET", "/v1/kvdb/jobs", key="admin")["jobs"]
    assert [each["state"] for each in listed] == ["done", "cancelled"]
    assert server.call("GET", "/v1/kvdb/jobs/99", key="admin").status_code == 404


def wait(server: Guarded, job_id: int) -> dict[str, Any]:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        job: dict[str, Any] = server.get("GET", f"/v1/kvdb/jobs/{job_id}", key="admin")
        if job["state"] != "running":
            return job
    raise AssertionError("the job did not end")


def test_sql_reads_and_a_miss_is_explained(server: Guarded) -> None:
    tokens = [13, *TOKENS]
    ask(server, tokens)
    body = {"sql": "SELECT hash, :n + 1 AS n FROM blocks LIMIT 1", "params": {"n": 1}}
    found = server.get("POST", "/v1/kvdb/sql", body, key="admin")
    assert (found["columns"], found["capped"]) == (["hash", "n"], False)
    assert (len(found["rows"][0][0]), found["rows"][0][1]) == (64, 2)
    (row,) = server.store.sql("SELECT max(id) FROM requests").rows
    for body in (
        {"request_id": row[0]},
        {"model": "tiny", "tokens": [*tokens[:40], 99, *tokens[41:]]},
    ):
        answer = server.call("POST", "/v1/kvdb/explain", body, key="admin")
        assert answer.status_code == 200, answer.text
    assert answer.json()["differing_token"] == 40


def test_keys_are_made_and_revoked(server: Guarded) -> None:
    made = server.get("POST", "/v1/kvdb/keys", {"role": "tenant", "tenant": "t"}, key="admin")
    answer = server.call("GET", "/v1/models", x_api_key=made["key"])
    assert answer.status_code == 200
    listed = server.call("GET", "/v1/kvdb/keys", key="admin")
    assert [key["id"] for key in listed.json()["keys"]] == [k.id for k in list_keys(server.store)]
    assert made["key"].split("_")[2] not in listed.text
    assert "salt" not in listed.text
    server.get("DELETE", f"/v1/kvdb/keys/{made['id']}", key="admin")
    assert server.call("GET", "/v1/models", x_api_key=made["key"]).status_code == 401
    assert server.call("DELETE", "/v1/kvdb/keys/999", key="admin").status_code == 404


def test_a_named_cache_is_held_and_hits(server: Guarded) -> None:
    tokens = [14, *TOKENS]
    body = {"name": "keeper", "model": "tiny", "tokens": tokens, "ttl_seconds": 3600}
    saved = server.get("POST", "/v1/kvdb/caches", body, key="a")
    assert (saved["name"], saved["tokens"]) == ("keeper", len(tokens))
    assert saved["computed_tokens"] == len(tokens)
    assert saved["expires_at"] > saved["created_at"]
    assert server.call("POST", "/v1/kvdb/caches", body, key="a").status_code == 400
    forked = server.get("POST", "/v1/kvdb/caches/keeper/fork", {"name": "two"}, key="a")
    assert (forked["tokens"], forked["expires_at"]) == (len(tokens), None)
    listed = server.get("GET", "/v1/kvdb/caches", key="a")["caches"]
    assert [each["name"] for each in listed] == ["keeper", "two"]
    server.get("POST", "/v1/kvdb/evict", {"to_bytes": 0}, key="admin")
    loaded = server.get("POST", "/v1/kvdb/caches/two/load", key="a")
    assert (loaded["name"], loaded["tokens"], loaded["lost"]) == ("two", len(tokens), 0)
    assert cached(server, tokens, key="a") == len(tokens)
    assert cached(server, tokens, key="b") == 0
    for name in ("keeper", "two"):
        assert server.get("DELETE", f"/v1/kvdb/caches/{name}", key="a")["dropped"]
    assert server.get("GET", "/v1/kvdb/caches", key="a") == {"caches": []}
    assert server.call("GET", "/v1/kvdb/caches/two", key="a").status_code == 404


def test_a_chat_goes_on_from_a_named_cache(server: Guarded) -> None:
    messages = [{"role": "system", "content": "You are a keeper of many words. " * 4}]
    body = {"name": "chat", "model": "tiny", "messages": messages}
    saved = server.get("POST", "/v1/kvdb/caches", body, key="main")
    body = {
        "model": "tiny",
        "messages": [*messages, {"role": "user", "content": "Hi"}],
        "max_tokens": 1,
    }
    usage = server.get("POST", "/v1/chat/completions", body, key="main")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= saved["tokens"] - 1
    (row,) = server.store.sql("SELECT tenant FROM sequences WHERE name = 'chat'").rows
    assert row == ("",)


def test_what_a_tenant_may_hold_is_bounded(server: Guarded) -> None:
    tokens = [15, *TOKENS]
    server.store.evict(to_bytes=0)
    ask(server, tokens, key="b")
    (row,) = server.store.sql("SELECT sum(live_bytes) FROM namespaces WHERE tenant = 'b'").rows
    body = {"name": "large", "model": "tiny", "tokens": tokens}
    for quota, status in ((row[0], 400), (1000, 503)):
        server.store.set_quota(quota, tenant="b")
        answer = server.call("POST", "/v1/kvdb/caches", body, key="b")
        assert answer.status_code == status, answer.text
        server.store.evict(to_bytes=0)
    server.store.set_quota(None, tenant="b")
    assert server.get("GET", "/v1/kvdb/caches", key="b") == {"caches": []}


BIG = [-1, 1 << 32, 1 << 63, 10**30]


@pytest.mark.parametrize("big", BIG)
def test_numbers_that_nothing_has_are_said_to_be_wrong(server: Guarded, big: int) -> None:
    tokens = {"model": "tiny", "tokens": [big]}
    short = {"name": "big", "model": "tiny", "tokens": [1], "ttl_seconds": -abs(big)}
    bodies: list[tuple[str, str, Any]] = [
        ("DELETE", f"/v1/kvdb/keys/{big}", None),
        ("GET", f"/v1/kvdb/jobs/{big}", None),
        ("POST", "/v1/kvdb/explain", {"request_id": big}),
        ("POST", "/v1/kvdb/explain", tokens),
        ("POST", "/v1/kvdb/warm", tokens),
        ("POST", "/v1/kvdb/caches", {"name": "big", **tokens}),
        ("POST", "/v1/kvdb/caches", short),
        ("POST", "/v1/kvdb/verify", {"sample": big, "start": -abs(big)}),
        ("POST", "/v1/kvdb/sql", {"sql": "SELECT :n", "params": {"n": big}, "limit": -1}),
    ]
    for method, path, body in bodies:
        answer = server.call(method, path, body, key="admin")
        assert answer.status_code in (400, 404), (path, body, answer.text)
        assert answer.json()["error"]["message"].endswith(".")
    sql = {"sql": "SELECT :n AS n", "params": {"n": big}}
    assert server.call("POST", "/v1/kvdb/sql", sql, key="admin").status_code in (200, 400)
    evict = {"namespace_id": big, "dry_run": True}
    assert server.call("POST", "/v1/kvdb/evict", evict, key="admin").status_code in (200, 400)
