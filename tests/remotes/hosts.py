"""Three machines on this one: network namespaces ``a`` and ``b``, and ``middle`` between them.

Each has a loopback of its own. ``a`` and ``b`` reach ``middle``, and one another through it, over
links that can be made slow and whose bytes are counted.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
NAMES = Path("/run/netns")


def missing() -> str | None:
    """Why there can be no network namespaces here; None where there can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc (Debian: iproute2) are not installed"
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    name = f"kvdb-{uuid.uuid4().hex[:8]}"
    try:
        run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    run("ip", "netns", "del", name)
    return None


@dataclass(frozen=True)
class Host:
    """One machine. ``middle`` is the address at which it reaches the middle one."""

    name: str
    address: str
    middle: str
    threads: ThreadPoolExecutor

    def command(self, *words: str) -> list[str]:
        """A command line that runs another one there."""
        return ["ip", "netns", "exec", self.name, *words]

    def call(self, function: Callable[[], T]) -> T:
        """Run a function there: sockets that it makes are that machine's."""
        return self.threads.submit(function).result()


class Hosts:
    """See the module; ``middle`` has an address on each link."""

    def __init__(self, a: Host, b: Host, middle: Host) -> None:
        self.a = a
        self.b = b
        self.middle = middle

    def slow_down(self, host: Host, rate: str) -> None:
        """Bound what a host is sent, ``2mbit`` a second for example; ``""`` ends it."""
        link = self._link(host)
        run("tc", "-n", self.middle.name, "qdisc", "del", "dev", link, "root", check=False)
        if rate:
            shape = ("tbf", "rate", rate, "burst", "16kb", "latency", "1s")
            run("tc", "-n", self.middle.name, "qdisc", "add", "dev", link, "root", *shape)

    def sent(self, host: Host) -> int:
        """Bytes that a host was sent so far."""
        shown = run("ip", "-n", self.middle.name, "-s", "-j", "link", "show", self._link(host))
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def _link(self, host: Host) -> str:
        return "to-a" if host is self.a else "to-b"


def run(*words: str, check: bool = True) -> str:
    return subprocess.run(words, check=check, capture_output=True, text=True).stdout


def _enter(name: str) -> None:
    """Move the calling thread into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(NAMES / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(fd, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Make the three machines, and remove them at the end."""
    tag = uuid.uuid4().hex[:8]
    names = {each: f"kvdb-{each}-{tag}" for each in ("a", "b", "middle")}
    pools: list[ThreadPoolExecutor] = []

    def host(each: str, address: str, middle: str) -> Host:
        name = names[each]
        pool = ThreadPoolExecutor(1, name, initializer=_enter, initargs=(name,))
        pools.append(pool)
        return Host(name, address, middle, pool)

    made: list[str] = []
    try:
        for name in names.values():
            run("ip", "netns", "add", name)
            made.append(name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run(*_in(names["middle"]), "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for number, each in enumerate(("a", "b")):
            _join(names[each], names["middle"], f"to-{each}", number)
        yield Hosts(
            host("a", "10.231.0.2", "10.231.0.1"),
            host("b", "10.231.1.2", "10.231.1.1"),
            host("middle", "10.231.0.1", "127.0.0.1"),
        )
    finally:
        for pool in pools:
            pool.shutdown()
        for name in made:
            run("ip", "netns", "del", name, check=False)


def _in(name: str) -> Sequence[str]:
    return ("ip", "netns", "exec", name)


def _join(outer: str, middle: str, link: str, number: int) -> None:
    peer = ("type", "veth", "peer", "name", "eth0", "netns", outer)
    run("ip", "-n", middle, "link", "add", link, *peer)
    for name, device, end in ((middle, link, 1), (outer, "eth0", 2)):
        run("ip", "-n", name, "addr", "add", f"10.231.{number}.{end}/24", "dev", device)
        run("ip", "-n", name, "link", "set", device, "up")
    run("ip", "-n", outer, "route", "add", "default", "via", f"10.231.{number}.1")
