"""What the attempts ask, and how."""

from __future__ import annotations

from collections.abc import Callable

from tests.http.guarded import Guarded

SECRET = list(range(2, 72))
MAX_BODY = 200_000
TIMES = {"header_seconds": 0.3, "body_seconds": 0.3}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
INFERENCE = ("POST", "/v1/chat/completions", CHAT)
Start = Callable[..., Guarded]


def head(server: Guarded, *lines: str, path: str = "/v1/chat/completions") -> bytes:
    """The head of a POST with the main key."""
    first = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    key = f"Authorization: Bearer {server.keys['main'].text}\r\n"
    return (first + key + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode()
