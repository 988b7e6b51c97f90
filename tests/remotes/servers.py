"""Servers of others that the tests start on loopback: one class each, ended by pid.

``with Seaweed(folder) as server`` returns when it answers. All data lie in the folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

from tests.remotes.hosts import Host

BUCKET = "kvdb"
KEY_ID, KEY = "kvdb", "kvdb-secret-for-tests"
READER_ID, READER_KEY = "reader", "reader-secret-for-tests"
READY_SECONDS = 30.0
ONLY_READS = f"""{{"identities": [
  {{"name": "all", "credentials": [{{"accessKey": "{KEY_ID}", "secretKey": "{KEY}"}}],
    "actions": ["Admin", "Read", "Write", "List"]}},
  {{"name": "reader", "credentials": [{{"accessKey": "{READER_ID}", "secretKey": "{READER_KEY}"}}],
    "actions": ["Read", "List"]}}]}}"""


def program(name: str) -> str | None:
    """A program of this environment or of the system."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def bound_to(host: Host | None) -> str:
    """Where a server listens: in a namespace of the test's own, on all links."""
    return "127.0.0.1" if host is None else "0.0.0.0"  # noqa: S104


class Server:
    """A program that runs from ``__enter__`` to ``__exit__``, on this machine or on ``host``; its
    output is in ``log``."""

    def __init__(self, folder: Path, command: list[str], host: Host | None = None) -> None:
        self.log = folder / "server.log"
        self._command = command if host is None else host.command(*command)
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None

    def ready(self) -> bool:
        """Whether it answers."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + READY_SECONDS
        while not (self.ready() if self._host is None else self._host.call(self.ready)):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"{self._command[0]} did not start:\n{self.log.read_text()}")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        # Killed, as its data go too: SeaweedFS takes 25 s to say good-bye.
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """End it; it can be entered once more, at the same port."""
        self.__exit__()

    def pause(self) -> None:
        """Let it hang: connections are taken, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class Seaweed(Server):
    """SeaweedFS with its S3 gateway and one bucket: ready in about a second."""

    def __init__(self, folder: Path, host: Host | None = None) -> None:
        ports = free_ports(8)
        services = ("master", "volume", "filer", "s3")
        (folder / "keys.json").write_text(ONLY_READS)
        (folder / "data").mkdir()
        self.port = ports[3]
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(
            folder,
            [
                program("weed") or "weed", "mini", "-dir", str(folder / "data"),
                "-ip", "127.0.0.1", "-ip.bind", bound_to(host), "-bucket", BUCKET,
                "-s3.config", str(folder / "keys.json"), "-s3.port.iceberg=0", "-s3.port.lance=0",
                "-admin.ui=false", "-webdav=false",
                *(f"-{name}.port={port}" for name, port in zip(services, ports[:4], strict=True)),
                *(f"-{name}.port.grpc={n}" for name, n in zip(services, ports[4:], strict=True)),
            ],
            host,
        )  # fmt: skip

    def ready(self) -> bool:
        # The port answers before the bucket is there.
        if _status(self.url) is None:
            return False
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        store = S3Store(
            BUCKET,
            config={"endpoint": self.url},
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
            credential_provider=lambda: {
                "access_key_id": KEY_ID,
                "secret_access_key": KEY,
                "expires_at": None,
            },
        )
        try:
            store.put("ready", b"")
        except (BaseError, OSError):
            return False
        return True


class Rclone(Server):
    """``rclone serve s3`` of a folder, in which the bucket is a folder."""

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        data = folder / "data"
        (data / BUCKET).mkdir(parents=True)
        super().__init__(
            folder,
            [
                program("rclone") or "rclone", "serve", "s3", "--addr", f"127.0.0.1:{self.port}",
                "--auth-key", f"{KEY_ID},{KEY}", "--config", os.devnull,
                str(data),
            ],
        )  # fmt: skip

    def ready(self) -> bool:
        return _status(self.url) is not None


class Azurite(Server):
    """Microsoft's own emulator of Azure Blob (npm package azurite), in memory, with a container."""

    ACCOUNT = "devstoreaccount1"
    # The emulator's well-known key.
    ACCOUNT_KEY = (
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    )

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}/{self.ACCOUNT}"
        super().__init__(
            folder,
            [
                program("azurite-blob") or "azurite-blob", "--inMemoryPersistence",
                "--blobPort", str(self.port),
                "--skipApiVersionCheck", "--silent",
            ],
        )  # fmt: skip

    def ready(self) -> bool:
        return _status(self.url) is not None and self._container()

    def _container(self) -> bool:
        """Make the container, signed as the protocol asks."""
        import base64
        import hmac
        from email.utils import formatdate

        date = formatdate(usegmt=True)
        path = f"/{self.ACCOUNT}/{self.ACCOUNT}/{BUCKET}"
        text = (
            f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:2023-11-03\n{path}\nrestype:container"
        )
        key = base64.b64decode(self.ACCOUNT_KEY)
        signature = base64.b64encode(hmac.digest(key, text.encode(), "sha256")).decode()
        headers = {
            "x-ms-date": date,
            "x-ms-version": "2023-11-03",
            "Authorization": f"SharedKey {self.ACCOUNT}:{signature}",
        }
        url = f"{self.url}/{BUCKET}?restype=container"
        return _status(url, method="PUT", headers=headers) in (201, 409)


def _status(url: str, method: str = "GET", headers: dict[str, str] | None = None) -> int | None:
    """What a server on loopback answers; None where nobody does."""
    request = urllib.request.Request(url, method=method, headers=headers or {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
