"""What a remote is: immutable objects under keys, which several machines put and get.

A key says what its object must contain (kvdb/remotes/naming.py), and whoever gets one checks that,
so machines share a remote without a coordinator, and a remote that lies is only a slow one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from kvdb.errors import KvdbError

PutState = Literal["stored", "present", "full", "failed"]


class RemoteError(KvdbError):
    """A remote cannot be used now."""


class RemoteUnreachable(RemoteError):
    """Nothing answers there, or not in time."""


class RemoteRefused(RemoteError):
    """The remote does not let us in, or does not have the bucket, folder or database named."""


class Get(NamedTuple):
    """An object wanted. ``buffer`` is writable, of bytes, and at least as large as the object may
    be; what does not fit is not fetched."""

    key: str
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class Got:
    """What became of the ``index``-th of the objects wanted: its first ``nbytes`` bytes of buffer
    are it; or, where ``nbytes`` is None, ``problem`` says why, in a word or a few; without one the
    remote does not have it."""

    index: int
    nbytes: int | None
    problem: str | None = None


class Put(NamedTuple):
    """An object to be stored: ``buffers`` one after another. With ``replace`` also over one that
    is there, which turned out to be bad."""

    key: str
    buffers: Sequence[memoryview]
    replace: bool = False


class Listed(NamedTuple):
    key: str
    nbytes: int


class Remote(Protocol):
    """One remote. Methods may be called from several threads at once; every wait ends within the
    time-out that the remote was opened with. Whole calls raise RemoteUnreachable or RemoteRefused,
    in one sentence; what concerns one object is in its answer. An object is visible whole or not
    at all, as far as the remote can promise that: what arrives is checked all the same."""

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """Which objects are there: as few round trips as the remote allows."""

    def get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        """Fetch objects into their buffers, several at once; answers come as objects do, in any
        order, one for each."""

    def put_many(self, puts: Sequence[Put]) -> list[PutState]:
        """Store objects. One that is there is ``present`` and not sent again, unless it is to be
        replaced; ``full`` where the remote has no room for it. One of no bytes may be
        ``failed``: none of ours is empty, and some stores have no such."""

    def list(self, prefix: str) -> Iterator[Listed]:
        """All objects whose keys begin so, in any order, a page at a time: there may be millions,
        and they may be others'."""

    def close(self) -> None:
        """Give connections back. Idempotent."""


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """How a remote is reached. ``url`` and ``options`` are stored and shown, so they hold no
    secret; ``secrets`` come from the environment."""

    name: str
    url: str
    options: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    timeout_seconds: float = 10.0

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def salted(self) -> bool:
        """True when namespaces of tenants of their own are shared there too."""
        return self.options.get("salted") == "true"
