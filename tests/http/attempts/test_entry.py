"""Attempts 1 to 11, to get in: where it listens, keys, browsers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from engine.http.access import AccessOptions, check_bind
from kvdb.errors import UsageError
from kvdb.keys import create_key, revoke_key
from kvdb.store import Store
from tests.http.attempts.asking import CHAT, INFERENCE, SECRET, Start
from tests.http.guarded import Guarded
from tests.http.serving import send_raw, status_of

# -- 1, 2: where it listens ----------------------------------------------------------------------


ELSEWHERE = ["0.0.0.0", "::", "192.168.1.5", "example.com", "127.1", ""]  # noqa: S104


@pytest.mark.parametrize("host", ELSEWHERE)
def test_1_no_key_and_not_loopback_does_not_start(store: Store, host: str) -> None:
    for kept in (store, None):
        with pytest.raises(UsageError, match=r"^Without a key only this machine is served"):
            check_bind(AccessOptions(host=host), kept)
    check_bind(AccessOptions(host=host, allow_unauthenticated_inference=True), store)
    for local in ("127.0.0.1", "::1", "localhost", "127.8.9.10"):
        check_bind(AccessOptions(host=local), None)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_2_no_auth_goes_with_loopback_only(host: str) -> None:
    with pytest.raises(UsageError, match="listen on 127"):
        AccessOptions(host=host, no_auth=True)
    AccessOptions(host="::1", no_auth=True)


# -- 3 to 8: keys --------------------------------------------------------------------------------
ADMINISTRATION: list[tuple[str, str, Any]] = [
    ("GET", "/v1/kvdb/models", None),
    ("POST", "/v1/kvdb/models/load", {"model": "tiny"}),
    ("POST", "/v1/kvdb/models/unload", {"model": "tiny"}),
    ("POST", "/v1/kvdb/models/pin", {"model": "tiny"}),
    ("POST", "/v1/kvdb/warm", {"model": "tiny", "tokens": SECRET}),
    ("POST", "/v1/kvdb/evict", {"to_bytes": 0}),
    ("POST", "/v1/kvdb/verify", {}),
    ("GET", "/v1/kvdb/jobs", None),
    ("POST", "/v1/kvdb/sql", {"sql": "SELECT 1"}),
    ("POST", "/v1/kvdb/explain", {"request_id": 1}),
    ("GET", "/v1/kvdb/keys", None),
    ("POST", "/v1/kvdb/keys", {"role": "admin"}),
    ("DELETE", "/v1/kvdb/keys/1", None),
]


def wrong_keys(server: Guarded) -> dict[str, str]:
    ((kept, *_), *_) = server.store.sql("SELECT hex(hash) FROM keys").rows
    main, admin = server.keys["main"].text, server.keys["admin"].text
    return {
        "changed": main[:-2] + ("AA" if main[-2:] != "AA" else "BB"),
        "cut": main[:-1],
        "longer": main + "A",
        "another's id": admin.replace(f"_{server.keys['admin'].key.id}_", "_1_"),
        "no such id": main.replace("kvdb_1_", "kvdb_999_"),
        "the hash": f"kvdb_1_{kept[:43]}",
        "revoked": server.keys["gone"].text,
        "of another program": "sk-ant-api03-abc",
        "SQL": "kvdb_1_' OR 1=1 --",
    }


def test_3_without_a_key_nothing_is_done(keyed: Guarded) -> None:
    for method, path, body in (INFERENCE, *ADMINISTRATION):
        answer = keyed.call(method, path, body)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "authentication_error"


def test_4_a_wrong_or_revoked_key_is_none(keyed: Guarded) -> None:
    for name, text in wrong_keys(keyed).items():
        for headers in ({"authorization": f"Bearer {text}"}, {"x-api-key": text}):
            answer = keyed.call(*INFERENCE, **headers)
            assert answer.status_code == 401, name
            assert text not in answer.text
    assert keyed.call(*INFERENCE, **{"x-api-key": ""}).status_code == 401
    basic = httpx.BasicAuth("main", keyed.keys["main"].text)
    answer = httpx.post(f"http://127.0.0.1:{keyed.port}/v1/chat/completions", auth=basic, json=CHAT)
    assert answer.status_code == 401
    two = {"authorization": f"Bearer {keyed.keys['a'].text}", "x-api-key": keyed.keys["b"].text}
    assert keyed.call("GET", "/v1/models", **two).status_code == 401


def test_5_a_key_in_the_query_is_none(keyed: Guarded) -> None:
    text = keyed.keys["admin"].text
    for name in ("key", "api_key", "api-key", "x-api-key", "access_token", "authorization"):
        assert keyed.call("GET", f"/v1/kvdb/keys?{name}={text}").status_code == 401
    assert keyed.call("GET", f"/v1/kvdb/keys?key={text}", key="main").status_code == 403


@pytest.mark.parametrize("key", ["main", "a"])
def test_6_administration_is_for_the_admin_key(keyed: Guarded, key: str) -> None:
    for method, path, body in ADMINISTRATION:
        assert keyed.call(method, path, body, key=key).status_code == 403, path
    overview = keyed.call("GET", "/metrics", key=key).status_code
    assert overview == (200 if key == "main" else 403)


def test_7_unauthenticated_inference_is_inference_only(lenient: Guarded) -> None:
    assert lenient.call(*INFERENCE).status_code == 200
    for method, path, body in ADMINISTRATION:
        assert lenient.call(method, path, body).status_code == 403, path
    for path in ("/metrics", "/v1/kvdb/caches"):
        assert lenient.call("GET", path).status_code == 403
    # A mistyped key is told, not taken for none.
    wrong = wrong_keys(lenient)["changed"]
    assert lenient.call(*INFERENCE, x_api_key=wrong).status_code == 401
    assert lenient.call(*INFERENCE, x_kvdb_tenant="a").status_code == 403


def test_8_a_keyless_server_has_no_administration_and_locks_with_the_first_key(
    keyless: Guarded, start: Start
) -> None:
    assert keyless.call(*INFERENCE, x_api_key="sk-any").status_code == 200
    assert keyless.call("GET", "/metrics").status_code == 200
    for method, path, body in ADMINISTRATION:
        assert keyless.call(method, path, body).status_code == 403, path
    other = start(keyed=False)
    new = create_key(other.store, "main")
    assert other.call(*INFERENCE).status_code == 401
    assert other.call(*INFERENCE, x_api_key=new.text).status_code == 200
    revoke_key(other.store, new.key.id)
    assert other.call(*INFERENCE).status_code == 401
    assert other.call(*INFERENCE, x_api_key=new.text).status_code == 401


# -- 9 to 11: browsers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        b"Host: evil.example",
        b"Host: evil.example:80",
        b"Host: localhost.evil.example",
        b"Host: 127.0.0.1.evil.example",
        b"Host: 192.168.1.5",
        b"Host: 0.0.0.0",
        b"Host: user@127.0.0.1",
        b"Host: [::1",
        b"Host: ",
        b"Host: evil.example\r\nX-Forwarded-Host: localhost",
    ],
)
def test_9_a_host_that_is_not_this_one(keyless: Guarded, host: bytes) -> None:
    for path in (b"/health", b"/v1/models", b"/v1/kvdb/keys"):
        request = b"GET " + path + b" HTTP/1.1\r\n" + host + b"\r\nConnection: close\r\n\r\n"
        answer = send_raw(keyless.port, request)
        assert status_of(answer) in (400, 403), answer
    # Nor two, nor none.
    for head in (b"HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", b"HTTP/1.0\r\n"):
        assert status_of(send_raw(keyless.port, b"GET /health " + head + b"\r\n")) in (400, 403)


def test_10_a_page_of_another_site(keyless: Guarded) -> None:
    for origin in ("https://evil.example", "null", f"http://evil.example:{keyless.port}"):
        assert keyless.call(*INFERENCE, origin=origin).status_code == 403
        assert keyless.call("GET", "/metrics", origin=origin).status_code == 403
        # As a form can send without asking first.
        plain = {"origin": origin, "content-type": "text/plain"}
        assert keyless.call(*INFERENCE, **plain).status_code == 403
    own = f"http://127.0.0.1:{keyless.port}"
    assert keyless.call(*INFERENCE, origin=own).status_code == 200


def test_11_cors_is_off_unless_an_origin_is_named(
    keyless: Guarded, keyed: Guarded, start: Start
) -> None:
    asks = {"access_control_request_method": "POST", "origin": "https://friend.example"}
    for server in (keyless, keyed):
        answer = server.call("OPTIONS", "/v1/chat/completions", **asks)
        assert answer.status_code >= 400
        assert not [name for name in answer.headers if name.startswith("access-control")]
    open_ = start(cors_origins=("https://friend.example",))
    answer = open_.call("OPTIONS", "/v1/chat/completions", **asks)
    assert answer.headers["access-control-allow-origin"] == "https://friend.example"
    # It may call, but who it is must still be said; and the answer can be read.
    answer = open_.call(*INFERENCE, origin="https://friend.example")
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == "https://friend.example"
    asks["origin"] = "https://evil.example"
    answer = open_.call("OPTIONS", "/v1/chat/completions", **asks)
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers
    for origin in ("*", "https://*", "friend.example"):
        with pytest.raises(UsageError, match="is not an origin"):
            AccessOptions(cors_origins=(origin,))
