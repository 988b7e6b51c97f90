"""How uvicorn listens: nothing it does by default gets round access control."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.http.access import AccessOptions

MAX_HEADER_BYTES = 64 << 10
KEEP_ALIVE_SECONDS = 30


class _GuardedProtocol(H11Protocol):
    """Ends a connection whose request's header is not complete in time, for which uvicorn would
    wait for ever; and one that is too many: the store needs descriptors, too."""

    header_seconds: float
    max_connections: int
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self.access_log = False  # whatever the program does to loggers: it shows query strings
        # asyncio does this only for sockets that it made itself. Without it Nagle's algorithm holds
        # an answer's second write back until the client's delayed ACK, 40 ms.
        connection = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._await_header()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_header(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.header_seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def uvicorn_options(options: AccessOptions) -> dict[str, Any]:
    """Arguments of ``uvicorn.Config`` for a server that is guarded as ``options`` say.

    A proxy's headers are anybody's word, and are not read.
    """

    class Protocol(_GuardedProtocol):
        header_seconds = options.header_seconds
        max_connections = options.max_connections

    return {
        "host": options.host,
        "port": options.port,
        "http": Protocol,
        "ws": "none",
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
    }
