"""The tar stream of a snapshot: plain files of our own names, written and read in one pass.

A header is what this program itself would write for a name and a size, to the byte: no link,
device, long name, sparse file or other extension can be told in one.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import re
import tarfile
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvdb.errors import SnapshotRejected
from kvdb.reader import Bytes, empty_bytes

RECORD = 512
PIECE_BYTES = 1 << 20
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
END = bytes(2 * RECORD)
BLOCK_NAME = re.compile(r"blocks/(0|[1-9][0-9]{0,3})/([0-9a-f]{64})\.safetensors")


class Readable(Protocol):
    """What a snapshot is read from: a file, a pipe."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


class Entry(NamedTuple):
    """A member's name and size, as its header says."""

    name: str
    nbytes: int


def block_name(namespace: int, hash_: bytes) -> str:
    """The member of a block; ``namespace`` is its number in the manifest."""
    return f"blocks/{namespace}/{hash_.hex()}.safetensors"


def header(name: str, nbytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = nbytes
    info.mode = 0o400
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def entry(name: str, buffers: Sequence[memoryview]) -> list[memoryview]:
    """A whole member: header, ``buffers``, padding."""
    nbytes = sum(buffer.nbytes for buffer in buffers)
    padding = bytes(-nbytes % RECORD)
    return [memoryview(header(name, nbytes)), *buffers, memoryview(padding)]


def sums_line(digest: bytes, name: str) -> bytes:
    """One line as ``sha256sum`` writes and checks it."""
    return f"{digest.hex()}  {name}\n".encode()


def sha256(buffers: Sequence[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


class Digests:
    """Makes the list of digests, line after line: while a member is hashed, which takes longer
    than all else, the next one can be read. ``write`` is given the lines."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "kvdb-digest")
        self._hashing: tuple[str, concurrent.futures.Future[bytes]] | None = None

    def add(self, name: str, buffers: Sequence[memoryview]) -> None:
        """Hash the next member. Its bytes must stay until :meth:`wait`, or until the next one was
        added."""
        self.wait()
        self._hashing = name, self._executor.submit(sha256, buffers)

    def known(self, name: str, digest: bytes) -> None:
        """The next member's digest."""
        self.wait()
        self._write(sums_line(digest, name))

    def wait(self) -> None:
        hashing, self._hashing = self._hashing, None
        if hashing is not None:
            self._write(sums_line(hashing[1].result(), hashing[0]))

    def close(self) -> None:
        self._executor.shutdown()


class TarReader:
    """Reads a snapshot's stream from its start to its end. Everything raises SnapshotRejected for
    bytes that are not such a stream."""

    def __init__(self, source: Readable) -> None:
        self._source = source
        self.position = 0

    def next(self) -> Entry | None:
        """The next member's header, None behind the last; its bytes must be read before the next
        call."""
        block = self._exactly(RECORD)
        if block == bytes(RECORD):
            if self._exactly(RECORD) != bytes(RECORD) or self._source.readinto(
                memoryview(bytearray(1))
            ):
                raise SnapshotRejected("The snapshot goes on behind its end.")
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
            if block != header(info.name, info.size):
                raise SnapshotRejected("The snapshot has a member that kvdb does not write.")
        except (tarfile.TarError, ValueError) as error:
            raise SnapshotRejected("The snapshot has a header that is no tar header.") from error
        return Entry(info.name, info.size)

    def read(
        self,
        member: Entry,
        limit: int,
        allocate: Callable[[int], Bytes] = empty_bytes,
    ) -> memoryview:
        """A member's bytes, in memory that ``allocate`` gives for their number. One larger than
        ``limit`` is refused unread."""
        if member.nbytes > limit:
            raise SnapshotRejected(f"{member.name} says it has {member.nbytes} bytes.")
        data = allocate(member.nbytes).data
        self._fill(data)
        self._padding(member)
        return data.toreadonly()

    def skip(self, member: Entry) -> bytes:
        """A member's SHA-256; nothing is kept of it."""
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(member.nbytes, PIECE_BYTES)))
        for at in range(0, member.nbytes, PIECE_BYTES):
            piece = buffer[: member.nbytes - at]
            self._fill(piece)
            digest.update(piece)
        self._padding(member)
        return digest.digest()

    def _padding(self, member: Entry) -> None:
        if self._exactly(-member.nbytes % RECORD).strip(b"\0"):
            raise SnapshotRejected("The snapshot has bytes between its members.")

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._source.readinto(view)
            if not count:
                raise SnapshotRejected("The snapshot is cut short.")
            self.position += count
            view = view[count:]


Progress = Callable[[int, int], None]
