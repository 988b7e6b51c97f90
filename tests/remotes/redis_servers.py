"""Redis servers on loopback: one, with TLS, and a cluster of three."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import trustme
from redis.backoff import NoBackoff
from redis.client import Redis
from redis.exceptions import RedisError
from redis.retry import Retry

from tests.remotes.hosts import Host
from tests.remotes.servers import Server, bound_to, free_ports, program

SLOTS = 16384
NODES = 3


class RedisServer(Server):
    """redis-server without persistence. ``more`` are further words of its command line."""

    def __init__(
        self,
        folder: Path,
        *more: str,
        port: int | None = None,
        tls: bool = False,
        host: Host | None = None,
    ) -> None:
        self.port = port or free_ports(1)[0]
        self.url = f"{'rediss' if tls else 'redis'}://127.0.0.1:{self.port}"
        ports = ["--port", str(self.port)]
        self.ca = folder / "ca.pem"
        if tls:
            authority = trustme.CA()
            authority.cert_pem.write_to_path(self.ca)
            both = authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem
            both.write_to_path(folder / "server.pem")
            ports = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            ports += ["--tls-ca-cert-file", str(self.ca)]
            for name in ("cert", "key"):
                ports += [f"--tls-{name}-file", str(folder / "server.pem")]
        self._password = more[more.index("--requirepass") + 1] if "--requirepass" in more else None
        self._tls = {"ssl": True, "ssl_ca_certs": str(self.ca)} if tls else {}
        super().__init__(
            folder,
            [
                program("redis-server") or "redis-server", *ports, "--bind", bound_to(host),
                "--dir", str(folder), "--save", "", "--appendonly", "no",
                "--protected-mode", "no", *more,
            ],
            host,
        )  # fmt: skip

    @property
    def client(self) -> Redis:
        return Redis(
            host="127.0.0.1",
            port=self.port,
            password=self._password,
            socket_timeout=5,
            retry=Retry(NoBackoff(), 0),
            **self._tls,
        )

    def ready(self) -> bool:
        try:
            with self.client as client:
                return bool(client.ping())
        except RedisError:
            return False


class RedisCluster:
    """Three servers that share all slots, ready when each of them knows so."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[RedisServer] = []
        for number in range(NODES):
            (folder / str(number)).mkdir()
            words = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
            self.nodes.append(RedisServer(folder / str(number), *words))
        self.url = self.nodes[0].url

    def __enter__(self) -> Self:
        for node in self.nodes:
            node.__enter__()
        first = self.nodes[0]
        for number, node in enumerate(self.nodes):
            with node.client as client:
                bounds = SLOTS * number // NODES, SLOTS * (number + 1) // NODES - 1
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", *bounds)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", first.port)
        until(self.whole)
        return self

    def whole(self) -> bool:
        """Whether each node knows who has which slot, and that all are served."""
        for node in self.nodes:
            with node.client as client:
                slots = client.execute_command("CLUSTER", "SLOTS")
                if len({tuple(slot[2][:2]) for slot in slots}) < NODES:
                    return False
                if "cluster_state:ok" not in str(client.execute_command("CLUSTER", "INFO")):
                    return False
        return True

    def move(self, slot: int) -> None:
        """Give a slot without keys to another node."""
        with self.nodes[0].client as client:
            old = client.execute_command("CLUSTER", "SLOTS")
        owner = next(port for first, last, (_, port, *_), *_ in old if first <= slot <= last)
        new = next(node for node in self.nodes if node.port != owner)
        with new.client as client:
            name = client.execute_command("CLUSTER", "MYID")
        for node in sorted(self.nodes, key=lambda node: node is not new):
            with node.client as client:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", name)

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.__exit__()


def until(met: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for what other processes do."""
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
