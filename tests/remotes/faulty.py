"""A proxy on loopback that does to a real server's traffic what networks and servers do.

``Faulty(port)`` passes bytes both ways, whatever the protocol: it can go silent, throttle, and cut.
``FaultyHttp(port)`` understands requests and answers besides, one connection per request, and can
change either. A fault is set between calls and stays until it is ``None`` again.
"""

from __future__ import annotations

import email.utils
import http.client
import io
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self

PIECE = 1 << 14
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True)
class Traffic:
    """What may be wrong with the bytes from the server."""

    silent: bool = False  # takes connections and all that is sent, and answers nothing
    cut_after: int | None = None  # bytes from the server on one connection, then a reset
    bytes_per_second: int | None = None


class Faulty:
    """Listens on ``port``; a server on loopback is behind it."""

    def __init__(self, server_port: int) -> None:
        self.traffic = Traffic()
        self._server = ("127.0.0.1", server_port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._closing = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How many clients hold now."""
        with self._lock:
            return len(self._open)

    def cut_all(self) -> None:
        """Reset every connection there is."""
        with self._lock:
            for client in self._open:
                reset(client)
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()
        self._accepting.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._keep, args=(client,), daemon=True).start()

    def _keep(self, client: socket.socket) -> None:
        with self._lock:
            self._open.add(client)
        try:
            with suppress(OSError):
                self.serve(client)
        finally:
            with self._lock:
                self._open.discard(client)
            client.close()

    def serve(self, client: socket.socket) -> None:
        """One connection of a client, until either side ends it."""
        with socket.create_connection(self._server) as server:
            both = [client, server]
            sent = 0
            while True:
                ready, _, _ = select.select(both, [], [])
                if client in ready:
                    data = client.recv(PIECE)
                    if not data:
                        return
                    if not self.traffic.silent:
                        server.sendall(data)
                if server in ready:
                    data = server.recv(PIECE)
                    if not data:
                        return
                    self.send(client, data, sent)
                    sent += len(data)

    def send(self, client: socket.socket, data: bytes, sent: int = 0) -> None:
        """Bytes of the server, after ``sent`` others on this connection. Raises OSError after a
        cut."""
        traffic = self.traffic
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            if traffic.cut_after is not None and sent + len(piece) > traffic.cut_after:
                client.sendall(piece[: traffic.cut_after - sent])
                reset(client)
                raise ConnectionResetError
            if traffic.bytes_per_second is not None:
                self._closing.wait(len(piece) / traffic.bytes_per_second)
            client.sendall(piece)
            sent += len(piece)


def reset(client: socket.socket) -> None:
    """When it is closed, a connection ends as one whose peer has gone."""
    with suppress(OSError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """``announced`` is the Content-Length that is sent, whatever the body is."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    announced: int | None = None


Fault = Callable[[Request, Callable[[Request], Answer]], Answer]


class FaultyHttp(Faulty):
    """``fault(request, ask)`` gives the answer to a request; ``ask`` asks the server behind.
    ``requests`` are those seen, without bodies."""

    def __init__(self, server_port: int) -> None:
        super().__init__(server_port)
        self.fault: Fault | None = None
        self.requests: list[Request] = []

    def serve(self, client: socket.socket) -> None:
        with client.makefile("rb") as stream:
            request = read_request(stream)
            if request is None:
                return
            self.requests.append(replace(request, body=b""))
            if self.traffic.silent:
                while client.recv(PIECE):
                    pass
                return
            answer = self.fault(request, self._ask) if self.fault else self._ask(request)
            length = len(answer.body) if answer.announced is None else answer.announced
            head = [f"HTTP/1.1 {answer.status} Answer", f"Content-Length: {length}"]
            head += [f"{name}: {text}" for name, text in answer.headers.items()]
            head += ["Connection: close", "", ""]
            client.sendall("\r\n".join(head).encode())
            if request.method != "HEAD":
                self.send(client, answer.body)

    def _ask(self, request: Request) -> Answer:
        # A time-out of its own, so that no thread of a test outlives it.
        link = http.client.HTTPConnection(*self._server, timeout=30)
        try:
            link.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, text in request.headers.items():
                link.putheader(name, text)
            link.endheaders(request.body)
            answer = link.getresponse()
            body = answer.read()
            headers = {n: t for n, t in answer.getheaders() if n.lower() not in HOP_BY_HOP}
            length = int(answer.getheader("Content-Length") or len(body))
            return Answer(answer.status, headers, body, length)
        finally:
            link.close()

    def send_half(self, request: Request) -> Answer:
        """A client that goes in the middle of its request; as a fault, for a put."""
        with socket.create_connection(self._server) as server:
            head = [f"{request.method} {request.path} HTTP/1.1"]
            head += [f"{name}: {text}" for name, text in request.headers.items()]
            half = request.body[: len(request.body) // 2]
            server.sendall("\r\n".join([*head, "", ""]).encode() + half)
        raise ConnectionResetError


def read_request(stream: io.BufferedIOBase) -> Request | None:
    """None where the client said nothing."""
    first = stream.readline().decode("latin-1").split()
    if len(first) != 3:
        return None
    headers = {}
    while line := stream.readline().decode("latin-1").strip():
        name, _, text = line.partition(":")
        headers[name.strip()] = text.strip()
    length = next((int(t) for n, t in headers.items() if n.lower() == "content-length"), 0)
    return Request(first[0], first[1], headers, stream.read(length))


def failing(status: int, times: int, code: str = "InternalError") -> Fault:
    """The first requests fail, the others do not."""
    lock, left = threading.Lock(), [times]

    def fault(request: Request, ask: Callable[[Request], Answer]) -> Answer:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                return ask(request)
        body = f"<Error><Code>{code}</Code><Message>as the test wants</Message></Error>"
        return Answer(status, {"Content-Type": "application/xml"}, body.encode())

    return fault


def truncating(keep: int, *, announce_whole: bool) -> Fault:
    """Bodies end early, with the length that the whole has or with one that hides it."""

    def fault(request: Request, ask: Callable[[Request], Answer]) -> Answer:
        whole = ask(request)
        if request.method != "GET" or whole.status not in (200, 206):
            return whole
        announced = len(whole.body) if announce_whole else None
        return replace(whole, body=whole.body[:keep], announced=announced)

    return fault


def longer(extra: int, *, announce: bool) -> Fault:
    """Bodies go on after their end."""

    def fault(request: Request, ask: Callable[[Request], Answer]) -> Answer:
        whole = ask(request)
        if request.method != "GET" or whole.status != 200:
            return whole
        body = whole.body + bytes(extra)
        return replace(whole, body=body, announced=len(body) if announce else len(whole.body))

    return fault


def instead(bodies: dict[str, bytes]) -> Fault:
    """Other bodies than those asked for, by the end of the key: wrong ones under right names."""

    def fault(request: Request, ask: Callable[[Request], Answer]) -> Answer:
        answer = ask(request)
        for end, body in bodies.items():
            if request.method == "GET" and request.path.endswith(end):
                return replace(answer, body=body, announced=len(body))
        return answer

    return fault


def skewing(seconds: float) -> Fault:
    """A client whose clock is wrong, seen from the server. The signature no longer fits either,
    so this is for servers that look at the date first."""

    def fault(request: Request, ask: Callable[[Request], Answer]) -> Answer:
        then = time.time() + seconds
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(then))
        changed = dict(request.headers)
        for name in changed:
            if name.lower() == "x-amz-date":
                changed[name] = stamp
            elif name.lower() in ("date", "x-ms-date"):
                changed[name] = email.utils.formatdate(then, usegmt=True)
            elif name.lower() == "authorization":
                changed[name] = re.sub(r"/\d{8}/", f"/{stamp[:8]}/", changed[name])
        return ask(replace(request, headers=changed))

    return fault
