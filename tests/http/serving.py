"""A real server on loopback, in a thread of this process, and raw bytes to send it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

SECONDS = 30.0


@contextmanager
def serving(app: ASGIApp, **options: Any) -> Iterator[int]:
    """Serve ``app`` with the given arguments of uvicorn.Config; gives the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, **options))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(SECONDS)
            assert not thread.is_alive()


def send_raw(port: int, *pieces: bytes, seconds: float = SECONDS) -> bytes:
    """Send bytes as they are, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        received = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            while data := connection.recv(65536):
                received += data
        except ConnectionError:  # it hung up on what it did not want to read
            pass
        return received


def status_of(answer: bytes) -> int:
    """The status in a raw answer; 0 for none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
