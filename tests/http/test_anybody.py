"""Requests without a key, where everybody may ask models: they find nothing of who has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.http.guarded import guarded

CHAT = [{"role": "user", "content": "The plan is a secret of its owner. " * 8}]


def test_what_a_key_asked_is_not_found_without_one(tmp_path: Path) -> None:
    with guarded(tmp_path, allow_unauthenticated_inference=True) as server:

        def skip(key: str | None) -> Any:
            body = {"model": "tiny", "messages": CHAT, "max_tokens": 2}
            answer = server.get("POST", "/v1/chat/completions", body, key=key)
            return answer["usage"]["kvdb"]["skip"]

        assert [skip("main"), skip("main")] == ["none", "full"]
        assert [skip(None), skip(None)] == ["none", "full"]
        asked = {"model": "tiny", "input": "Hi", "max_output_tokens": 2}
        path = f"/v1/responses/{server.get('POST', '/v1/responses', asked, key='main')['id']}"
        assert server.call("GET", path).status_code == 404
        assert server.call("DELETE", path).status_code == 404
        assert server.call("GET", path, key="main").status_code == 200
        assert server.call("GET", "/v1/kvdb/caches").status_code == 403
