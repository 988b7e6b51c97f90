"""A process that has imported everything and forks a worker in a few milliseconds.

Run as a module it serves: each message names an operation of ``tests.crash.worker`` and brings two
pipe ends, which become the worker's standard input and output. It forks before it has opened any
store, so no connection or lock ever crosses a fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 60.0


class Worker:
    """One forked worker as its parent sees it."""

    def __init__(self, zygote: Zygote, pid: int, write_fd: int, read_fd: int) -> None:
        self.pid = pid
        self._zygote = zygote
        self._write_fd = write_fd
        self._read_fd = read_fd
        self._buffer = b""
        self.ended = False

    def say(self, word: str = "go") -> None:
        os.write(self._write_fd, f"{word}\n".encode())

    def line(self, seconds: float = PATIENCE_SECONDS) -> str | None:
        """The next whole line; None at its end or when ``seconds`` are over."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer and not self.ended:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read_fd], [], [], left)[0]:
                return None
            data = os.read(self._read_fd, 65536)
            self._buffer += data
            self.ended = not data
        if b"\n" not in self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def expect(self, word: str) -> list[str]:
        """Lines up to one that is ``word``."""
        lines: list[str] = []
        while (line := self.line()) != word:
            assert line is not None, f"worker ended or hung before {word!r}: {lines}"
            lines.append(line)
        return lines

    def rest(self) -> list[str]:
        """All lines until the worker ends; it may not take longer than its patience."""
        lines: list[str] = []
        while (line := self.line()) is not None:
            lines.append(line)
        if not self.ended:
            self.kill()
            raise AssertionError(f"worker {self.pid} hangs after {lines[-3:]}")
        return lines

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code (negative: a signal), after it is gone with all its locks."""
        os.close(self._write_fd)
        os.close(self._read_fd)
        return int(self._zygote.ask({"wait": self.pid}))


class Zygote:
    """The other end of the forking process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        theirs.close()

    def start(self, operation: str, path: Path, /, **arguments: Any) -> Worker:
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        message = {"start": operation, "path": str(path), "arguments": arguments}
        pid = self.ask(message, [in_read, out_write])
        os.close(in_read)
        os.close(out_write)
        return Worker(self, int(pid), in_write, out_read)

    def ask(self, message: dict[str, Any], fds: list[int] | None = None) -> Any:
        socket.send_fds(self._socket, [json.dumps(message).encode()], fds or [])
        return json.loads(self._socket.recv(65536))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(PATIENCE_SECONDS)


@contextmanager
def running_zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    try:
        yield zygote
    finally:
        zygote.close()


def serve(channel: socket.socket) -> None:
    from tests.crash.worker import OPERATIONS

    while True:
        data, fds, _, _ = socket.recv_fds(channel, 65536, 2)
        if not data:
            return
        message = json.loads(data)
        if "wait" in message:
            _, status = os.waitpid(message["wait"], 0)
            channel.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            channel.close()
            os.dup2(fds[0], 0)
            os.dup2(fds[1], 1)
            for fd in fds:
                os.close(fd)
            OPERATIONS[message["start"]](Path(message["path"]), **message["arguments"])
            sys.stdout.flush()
            os._exit(0)
        for fd in fds:
            os.close(fd)
        channel.send(json.dumps(pid).encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
