"""Attempts 21 to 25, with snapshots: others' state, state that lies, clients that go away."""

from __future__ import annotations

import contextlib
import io
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pyrage import x25519

from engine.http import streams
from kvdb.encryption import Keys
from tests.http.attempts.asking import SECRET, Start
from tests.http.guarded import Guarded
from tests.http.serving import send_raw, status_of

CACHES = "/v1/kvdb/caches"
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(start: Start) -> Guarded:
    """Where tenants a and b, and the main key, have named what they asked."""
    server = start()
    for key in ("a", "b", "main"):
        body = {"name": "secret", "model": "tiny", "tokens": SECRET}
        server.get("POST", CACHES, body, key=key)
    return server


@pytest.fixture(autouse=True)
def unharmed(server: Guarded) -> Iterator[None]:
    """After each attempt nothing is left of it, and all is as it was."""
    yield
    path = server.store.path
    assert server.call("GET", "/health").json() == {"live": True, "ready": True}
    for _ in range(1000):  # a client that went away is noticed a moment later
        left = [file for file in (path / "tmp").iterdir() if not file.name.startswith("ballast")]
        rows = server.store.sql("SELECT count(*) FROM shards WHERE state = 'writing'").rows
        if not left and rows == [(0,)]:
            break
    assert (left, rows) == ([], [(0,)])
    for key in ("a", "b", "main"):
        assert len(export(server, key)) > 0
    assert not server.store.verify().problems


def export(server: Guarded, key: str, path: str = f"{CACHES}/secret/export") -> bytes:
    answer = server.call("GET", path, key=key)
    assert answer.status_code == 200, answer.text
    return answer.content


def bring(
    server: Guarded, key: str, data: bytes | Iterator[bytes], name: str = "new", **headers: str
) -> httpx.Response:
    url = f"http://127.0.0.1:{server.port}{CACHES}/{name}/import?model=tiny"
    headers = {"authorization": f"Bearer {server.keys[key].text}", **headers}
    return httpx.post(url, content=data, headers=headers, timeout=60)


def members(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as snapshot:
        return snapshot.getnames()


def message(answer: httpx.Response) -> str:
    said: str = answer.json()["error"]["message"]
    assert said.endswith(".")
    return said


def counts(server: Guarded) -> list[tuple[Any, ...]]:
    return server.store.sql("SELECT count(*), sum(state = 'live') FROM blocks").rows


def drop(server: Guarded, key: str, name: str) -> None:
    assert server.call("DELETE", f"{CACHES}/{name}", key=key).status_code == 200


def test_what_a_tenant_exported_comes_back(server: Guarded) -> None:
    data = export(server, "a")
    names = members(data)
    assert names[0] == "manifest.json"
    assert len(names) == 2 + 5  # four blocks of 16 and a tail
    drop(server, "a", "secret")
    server.store.evict(to_bytes=0)
    answer = bring(server, "a", data, "again")
    assert answer.status_code == 201, answer.text
    assert (answer.json()["stored"], answer.json()["name"]) == (5, "again")
    assert server.get("GET", f"{CACHES}/again", key="a")["tokens"] == len(SECRET)
    (row,) = server.store.sql("SELECT tenant FROM sequences WHERE name = 'a/again'").rows
    assert row == ("a",)
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": 1}
    usage = server.get("POST", "/v1/completions", body, key="a")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(SECRET)
    # Once more, under its old name: nothing is stored again.
    assert bring(server, "a", data, "secret").json()["stored"] == 0
    assert "of that name already" in message(bring(server, "a", data, "secret"))
    drop(server, "a", "again")


def test_an_encrypted_export_opens_with_its_key_only(server: Guarded, tmp_path: Path) -> None:
    key = x25519.Identity.generate()
    path = f"{CACHES}/secret/export?encrypt={key.to_public()}"
    data = export(server, "a", path)
    assert data.startswith(b"age-encryption.org/")
    assert "encrypted" in message(bring(server, "a", data))
    file = tmp_path / "a.kvdb.age"
    file.write_bytes(data)
    assert server.store.import_snapshot(file, keys=Keys([key]), dry_run=True).present == 5
    answer = server.call("GET", f"{CACHES}/secret/export?encrypt=age1x", key="a")
    assert answer.status_code == 400


def test_21_another_tenants_cache(server: Guarded) -> None:
    """Neither read, nor brought in: not as one's own, nor into the key space that others share."""
    before = counts(server)
    fork = server.call("POST", f"{CACHES}/secret/fork", {"name": "only-as"}, key="a")
    assert fork.status_code == 201
    missing = server.call("GET", f"{CACHES}/nothing/export", key="b")
    theirs = server.call("GET", f"{CACHES}/only-as/export", key="b")
    assert (theirs.status_code, missing.status_code) == (404, 404)
    assert theirs.text.replace("only-as", "nothing") == missing.text
    drop(server, "a", "only-as")
    for key, owner in (("b", "a"), ("a", "main"), ("admin", "a")):
        answer = bring(server, key, export(server, owner))
        assert answer.status_code == 400
        assert "a key space that is not yours" in message(answer)
    # State that many would meet is for the admin key; and a tenant may not name another.
    assert bring(server, "main", export(server, "main")).status_code == 403
    answer = bring(server, "main", export(server, "a"), **{"x-kvdb-tenant": "a"})
    assert answer.status_code == 403
    assert bring(server, "b", export(server, "a"), **{"x-kvdb-tenant": "a"}).status_code == 403
    assert bring(server, "admin", export(server, "main")).json()["present"] == 5
    drop(server, "admin", "new")
    for method, path in (("GET", "/v1/kvdb/export"), ("POST", "/v1/kvdb/import")):
        for key, status in (("a", 403), ("main", 403), (None, 401)):
            assert server.call(method, path, key=key).status_code == status
    assert counts(server) == before


def test_22_snapshots_that_lie(server: Guarded) -> None:
    before, good = counts(server), export(server, "b")
    lies = {
        "": b"",
        "cut": good[: len(good) // 2],
        "one byte less": good[:-1],
        "longer": good + b"\0" * 512,
        "twice": good + good,
        "no snapshot": b"hello" * 1000,
        "zeros": bytes(MIB),
        "a bit": good[:2000] + bytes([good[2000] ^ 1]) + good[2001:],
        "in the state": good[:-3000] + bytes([good[-3000] ^ 1]) + good[-2999:],
    }
    for name, data in lies.items():
        answer = bring(server, "b", data)
        assert answer.status_code == 400, name
        assert answer.json()["error"]["code"] == "invalid_snapshot"
        message(answer)
    assert counts(server) == before
    # Of all of the store no tenant takes a part, nor a snapshot that names nothing.
    whole = export(server, "admin", "/v1/kvdb/export")
    assert bring(server, "b", whole).status_code == 400
    assert counts(server) == before


def test_23_more_than_the_store_may_hold(server: Guarded) -> None:
    most = server.store.limit.max_bytes
    key = f"Authorization: Bearer {server.keys['b'].text}\r\n"
    post = f"POST {CACHES}/x/import?model=tiny HTTP/1.1\r\nHost: localhost\r\n{key}"
    answer = send_raw(server.port, f"{post}Content-Length: {most + 1}\r\n\r\n".encode())
    assert status_of(answer) == 413  # by its own word: not waited for
    # A header that says more than a block may have is refused before it is read.
    header = tarfile.TarInfo("manifest.json")
    header.size = 1 << 32

    def endless() -> Iterator[bytes]:
        yield header.tobuf(tarfile.USTAR_FORMAT)
        for _ in range(4096):
            yield bytes(MIB)

    with contextlib.suppress(httpx.TransportError):  # it hangs up while more is being sent
        assert bring(server, "b", endless()).status_code == 400


def test_24_clients_that_go_away_half_way(server: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    before, good = counts(server), export(server, "b")
    key = f"Authorization: Bearer {server.keys['b'].text}\r\n"
    post = f"POST {CACHES}/half/import?model=tiny HTTP/1.1\r\nHost: localhost\r\n{key}"
    for at in (0, 600, len(good) // 2, len(good) - 1):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(f"{post}Content-Length: {len(good)}\r\n\r\n".encode() + good[:at])
    # One that stays, and sends nothing more, is told.
    monkeypatch.setattr(streams, "SECONDS", 0.2)
    request = f"{post}Content-Length: {len(good)}\r\n\r\n".encode() + good[:600]
    while status_of(answer := send_raw(server.port, request)) == 429:
        pass  # until it has noticed that the others went
    assert status_of(answer) == 408
    # Nor does an export wait for one that takes nothing, or went.
    get = f"GET {CACHES}/secret/export HTTP/1.1\r\nHost: localhost\r\n{key}\r\n".encode()
    for _ in range(streams.PLACES_EACH):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(get)
    while server.call("GET", f"{CACHES}/secret/export", key="b").status_code == 429:
        pass
    assert counts(server) == before


def test_25_many_at_once(server: Guarded) -> None:
    """More than there are places are told to come again; a place is given back."""
    key = f"Authorization: Bearer {server.keys['b'].text}\r\n"
    post = f"POST {CACHES}/half/import?model=tiny HTTP/1.1\r\nHost: localhost\r\n{key}"
    held = []
    while (answer := server.call("GET", f"{CACHES}/secret/export", key="b")).status_code == 200:
        # One may have come while an export had the last place.
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        connection.sendall(f"{post}Content-Length: 100000\r\n\r\n".encode())
        held.append(connection)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0
    export(server, "a")  # another tenant's places are free
    for connection in held:
        connection.close()
    while server.call("GET", f"{CACHES}/secret/export", key="b").status_code == 429:
        pass


def test_the_admin_key_takes_all_or_what_sql_says(server: Guarded) -> None:
    headers = {"authorization": f"Bearer {server.keys['admin'].text}"}

    def ask(**params: str) -> httpx.Response:
        return server.client.get("/v1/kvdb/export", params=params, headers=headers)

    whole = ask().content
    assert whole == ask().content
    ((live,),) = server.store.sql("SELECT count(*) FROM blocks WHERE state = 'live'").rows
    assert len(members(whole)) == live + 2
    assert len(members(ask(where="hits > 1e9").content)) == 2
    assert 2 < len(members(ask(where="depth = 0").content)) < live + 2
    for where in ("1) UNION SELECT id FROM keys --", "nonsense", "1; DELETE FROM blocks", ""):
        answer = ask(where=where)
        assert answer.status_code == 400, where
        message(answer)
    report = server.client.post("/v1/kvdb/import", content=whole, headers=headers).json()
    assert (report["blocks"], report["present"], report["new"]) == (live, live, 0)
