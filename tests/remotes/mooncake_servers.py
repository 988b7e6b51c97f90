"""Mooncake's master on loopback, and a client that lends memory."""

from __future__ import annotations

import importlib.util
import urllib.error
import urllib.request
from pathlib import Path

from tests.remotes.hosts import Host
from tests.remotes.servers import Server, bound_to, free_ports

SEGMENT_BYTES = 256 << 20


def mooncake_program(name: str) -> str | None:
    """A program of the package, which has no others' libraries missing."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        return None
    return str(Path(spec.submodule_search_locations[0]) / name)


class MooncakeMaster(Server):
    """mooncake_master with its metadata server."""

    def __init__(self, folder: Path, host: Host | None = None) -> None:
        listen = bound_to(host)
        self.port, metadata, admin = free_ports(3)
        self.url = f"mooncake://127.0.0.1:{self.port}"
        self.options = {
            "metadata": f"http://127.0.0.1:{metadata}/metadata",
            "admin": f"http://127.0.0.1:{admin}",
        }
        super().__init__(
            folder,
            [
                mooncake_program("mooncake_master") or "mooncake_master",
                f"-rpc_port={self.port}", f"-rpc_address={listen}",
                "-enable_http_metadata_server=true", f"-http_metadata_server_port={metadata}",
                f"-http_metadata_server_host={listen}",
                f"-metrics_port={admin}", f"-metrics_host={listen}", "-client_ttl=2",
            ],
            host,
        )  # fmt: skip

    def ready(self) -> bool:
        for address in (f"{self.options['metadata']}?key=x", f"{self.options['admin']}/health"):
            try:
                urllib.request.urlopen(address, timeout=5).close()  # noqa: S310
            except urllib.error.HTTPError:
                continue
            except OSError:
                return False
        return True
