"""Attempts 16 to 20, to get at what is another's; and what logs say of all that."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest

from tests.http.attempts.asking import CHAT, SECRET, head
from tests.http.guarded import Guarded
from tests.http.serving import send_raw, status_of


def cached(server: Guarded, key: str, **headers: str) -> int:
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": 1}
    headers = {"x_kvdb_no_store": "1", **headers}
    answer = server.call("POST", "/v1/completions", body, key=key, **headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_16_a_tenant_probes_for_what_another_asked(keyed: Guarded) -> None:
    assert cached(keyed, "a") == len(SECRET)
    assert cached(keyed, "b") == 0
    assert cached(keyed, "main") == 0
    assert keyed.call("GET", "/v1/kvdb/caches", key="b").json() == {"caches": []}
    missing = keyed.call("GET", "/v1/kvdb/caches/nothing", key="b").json()
    for method, path, body in (
        ("GET", "/v1/kvdb/caches/secret", None),
        ("POST", "/v1/kvdb/caches/secret/load", None),
        ("POST", "/v1/kvdb/caches/secret/fork", {"name": "mine"}),
        ("DELETE", "/v1/kvdb/caches/secret", None),
    ):
        answer = keyed.call(method, path, body, key="b")
        assert answer.status_code == 404
        assert answer.text.replace("secret", "nothing") == json.dumps(
            missing, separators=(",", ":")
        )
    # A name that another tenant has is free: whether it is taken would tell.
    body = {"name": "secret", "model": "tiny", "tokens": [5] * 20}
    keyed.get("POST", "/v1/kvdb/caches", body, key="b")
    keyed.get("DELETE", "/v1/kvdb/caches/secret", key="b")
    assert keyed.get("GET", "/v1/kvdb/caches/secret", key="a")["tokens"] == len(SECRET)


def test_16_a_name_is_its_tenants_however_it_is_written(keyed: Guarded) -> None:
    """Names that kvdb sequences made may look like a tenant's, or belong to one."""
    held = keyed.store.find_sequence("a/secret")
    for name, tenant in (("a/house", ""), ("loose", "a")):
        keyed.store.sequence(held.namespace, held.tip_hash, name=name, tenant=tenant)
    listed = {key: keyed.call("GET", "/v1/kvdb/caches", key=key).text for key in ("a", "main")}
    assert "house" not in listed["a"]
    assert "loose" not in listed["main"]
    for key, name in (("a", "house"), ("main", "loose"), ("main", "secret")):
        assert keyed.call("DELETE", f"/v1/kvdb/caches/{name}", key=key).status_code == 404
        assert keyed.call("GET", f"/v1/kvdb/caches/{name}", key=key).status_code == 404


def test_16_guesses_of_a_salt_or_a_tenant(keyed: Guarded) -> None:
    salt = keyed.keys["a"].key.cache_salt
    for guess in ("a", salt.hex(), salt.decode("latin-1").encode("ascii", "ignore").decode()):
        if guess.isprintable():
            assert cached(keyed, "b", x_kvdb_salt=guess) == 0
            assert cached(keyed, "main", x_kvdb_salt=guess) == 0
    assert cached(keyed, "main", x_kvdb_tenant="a") == 0
    for tenant in ("a", "", "A"):
        body = {"model": "tiny", "prompt": SECRET, "kvdb": {"tenant": tenant}}
        assert keyed.call("POST", "/v1/completions", body, key="b").status_code in (400, 403)


SQL = {
    "DELETE FROM requests": 400,
    "INSERT INTO keys SELECT * FROM keys": 400,
    "UPDATE keys SET role = 'admin'": 400,
    "ATTACH '/tmp/kvdb-attempt' AS a": 400,
    "VACUUM INTO '/tmp/kvdb-attempt'": 400,
    "PRAGMA writable_schema = 1": 400,
    "SELECT load_extension('x')": 400,
    "SELECT readfile('/etc/passwd')": 400,
    "SELECT 1; DELETE FROM requests": 400,
    "": 400,
}


@pytest.mark.parametrize("sql", SQL)
def test_17_sql_that_does_more_than_read(keyed: Guarded, sql: str) -> None:
    before = keyed.store.sql("SELECT count(*), group_concat(role) FROM keys").rows
    answer = keyed.call("POST", "/v1/kvdb/sql", {"sql": sql}, key="admin")
    assert answer.status_code == SQL[sql], answer.text
    assert keyed.store.sql("SELECT count(*), group_concat(role) FROM keys").rows == before
    assert not Path("/tmp/kvdb-attempt").exists()


@pytest.mark.parametrize(
    "sql",
    [
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n",
        "SELECT length(replace(hex(zeroblob(1000000000)), '0', 'aaaaaaaaaa'))",
        "SELECT printf('%.*c', 500000000, 'x')",
        "WITH RECURSIVE n (s) AS (SELECT 'aaaaaaaa' UNION ALL SELECT s || s FROM n) "
        "SELECT max(length(s)) FROM n",
    ],
)
def test_18_sql_that_never_ends_or_eats_memory(keyed: Guarded, sql: str) -> None:
    began = time.monotonic()
    body = {"sql": sql, "timeout": 0.5}
    answer = keyed.call("POST", "/v1/kvdb/sql", body, key="admin")
    assert answer.status_code == 400, answer.text
    assert time.monotonic() - began < 8


NAMES = [
    "..",
    "../a",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e%2f",
    "a%00b",
    "a%0ab",
    "ttl:1",
    "a/b",
    ".a",
]


def test_19_names_that_lead_elsewhere(keyed: Guarded) -> None:
    for name in NAMES:
        for key in ("a", "main"):
            path = f"/v1/kvdb/caches/{name}"
            raw = f"DELETE {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            raw += f"x-api-key: {keyed.keys[key].text}\r\n\r\n"
            assert status_of(send_raw(keyed.port, raw.encode())) in (400, 403, 404, 405), name
            decoded = name.replace("%2f", "/").replace("%00", "\0").replace("%0a", "\n")
            body = {"name": decoded, "model": "tiny", "tokens": SECRET}
            if decoded != "%2e%2e/":
                assert keyed.call("POST", "/v1/kvdb/caches", body, key=key).status_code == 400
    for path in (
        "/../../etc/passwd",
        "/static/../../pyproject.toml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/chat/..%2f..%2fetc/passwd",
        "/docs",
        "/openapi.json",
    ):
        for key in ("a", "main"):
            raw = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            raw += f"x-api-key: {keyed.keys[key].text}\r\n\r\n"
            answer = send_raw(keyed.port, raw.encode())
            assert status_of(answer) in (400, 404), answer
            assert b"root:" not in answer
    # A model's name is no path, nor an address to fetch from.
    for model in ("/etc/passwd", "../../x", "http://127.0.0.1:1/x", "hf.co/evil/model"):
        answer = keyed.call("POST", "/v1/chat/completions", {**CHAT, "model": model}, key="main")
        assert answer.status_code == 404


def test_20_requests_that_two_servers_would_read_in_two_ways(keyed: Guarded) -> None:
    inner = b"GET /v1/kvdb/keys HTTP/1.1\r\nHost: localhost\r\n\r\n"
    chunked = b"0\r\n\r\n" + inner
    for lines in (
        (f"Content-Length: {len(chunked)}", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 0"),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: 5, 6",),
        ("Content-Length: +5",),
        ("Content-Length: -1",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding : chunked",),
    ):
        answer = send_raw(keyed.port, head(keyed, *lines) + chunked)
        assert status_of(answer) in (400, 501), lines
        assert answer.count(b"HTTP/1.1 ") == 1, lines  # what came behind was not answered


def test_20_a_method_in_a_header_is_not_the_method(keyed: Guarded) -> None:
    for name in ("x_http_method_override", "x_http_method", "x_method_override"):
        answer = keyed.call("POST", "/v1/kvdb/caches/secret", key="a", **{name: "DELETE"})
        assert answer.status_code in (404, 405)
        assert (
            keyed.call("GET", "/v1/kvdb/caches/secret?_method=DELETE", key="a").status_code == 200
        )
    for path in ("/v1/kvdb/keys", "/v1/kvdb/sql", "/health"):
        for method in ("TRACE", "CONNECT", "PATCH", "PROPFIND"):
            raw = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            assert status_of(send_raw(keyed.port, raw.encode())) in (400, 401, 405)
    # An address is not a path, and a rewritten one is not looked at.
    rewritten = {"x_original_url": "/v1/kvdb/keys", "x_rewrite_url": "/v1/kvdb/keys"}
    assert keyed.call("GET", "/health", **rewritten).json() == {"live": True, "ready": True}


def test_no_key_and_no_prompt_is_in_a_log(keyed: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    words = "a-prompt-that-nobody-may-read"
    body = {**CHAT, "messages": [{"role": "user", "content": words}]}
    key = keyed.keys["a"].text
    answer = keyed.call(
        "POST", f"/v1/chat/completions?q={words}", body, key="a", x_request_id="me-1"
    )
    assert (answer.headers["x-request-id"], answer.headers["request-id"]) == ("me-1", "me-1")
    keyed.call("POST", f"/{words}", body, key="a")
    keyed.call("GET", f"/v1/models?key={key}", x_request_id=f"x {key}")
    keyed.call("GET", "/v1/models", authorization=f"Bearer {key}x")
    logged = [r.getMessage() for r in caplog.records if r.name == "kvdb.http.requests"]
    lines = [json.loads(line) for line in logged[-4:]]
    assert [(line["status"], line["route"], line["tenant"]) for line in lines] == [
        (200, "/v1/chat/completions", "a"),
        (404, None, "a"),
        (401, "/v1/models", None),
        (401, "/v1/models", None),
    ]
    assert lines[0]["request_id"] == "me-1"
    assert lines[0]["key_id"] == keyed.keys["a"].key.id
    secrets = (words, key, key.split("_")[2])
    own = [r for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]
    assert own
    for record in own:
        assert not any(secret in f"{record.getMessage()}{record.args}" for secret in secrets)
    figures = keyed.call("GET", "/metrics", key="main").text
    assert not any(secret in figures for secret in secrets)
