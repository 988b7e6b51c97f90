"""Encryption for the road: age recipients and passphrases, as a stream.

For recipients the file is a plain age file. age itself encrypts under a passphrase only what fits
into memory; so a file for a passphrase is an age file for a key of its own, and before it, under
the passphrase, that key: a line ``kvdb-sealed/1 LENGTH``, LENGTH bytes of age, then the age file.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvdb.errors import SnapshotRejected, UsageError

if TYPE_CHECKING:
    from kvdb.snapshot.stream import Readable

AGE_MAGIC = b"age-encryption.org/"
SEALED_MAGIC = b"kvdb-sealed/1 "
MAGIC_BYTES = max(len(AGE_MAGIC), len(SEALED_MAGIC))
MAX_KEY_BYTES = 16 << 10
WRONG_KEY = "The data is encrypted for another key or passphrase, or damaged."


class Writable(Protocol):
    """What encrypted bytes are written to."""

    def write(self, data: memoryview, /) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Keys:
    """What opens an encrypted file: age identities (x25519 or SSH) or a passphrase."""

    identities: Sequence[Any] = ()
    passphrase: str | None = None


class Lock:
    """Encrypts a stream for recipients, or under a passphrase."""

    def __init__(self, recipients: Sequence[str] = (), passphrase: str | None = None) -> None:
        """Raises UsageError for a recipient that is none, or where pyrage is not installed."""
        if bool(recipients) == (passphrase is not None):
            raise UsageError("Encrypt for recipients or under a passphrase, one of both.")
        self._recipients = [parse_recipient(text) for text in recipients]
        self._passphrase = passphrase

    def seal(self, buffers: Iterator[memoryview], target: Writable) -> None:
        """Write ``buffers``, encrypted, to ``target``."""
        pyrage = require_pyrage()
        recipients = self._recipients
        if self._passphrase is not None:
            key = pyrage.x25519.Identity.generate()
            recipients = [key.to_public()]
            locked = pyrage.passphrase.encrypt(str(key).encode(), self._passphrase)
            write_whole(target, memoryview(SEALED_MAGIC + f"{len(locked)}\n".encode() + locked))
        pyrage.encrypt_io(_Source(buffers), _Sink(target), recipients)


def read_identities(path: Path) -> list[Any]:
    """The keys of an age identity file, or of an unencrypted SSH private key. Raises UsageError."""
    pyrage = require_pyrage()
    data = path.read_bytes()
    try:
        if data.lstrip().startswith(b"-----BEGIN"):
            return [pyrage.ssh.Identity.from_buffer(data)]
        lines = [line.strip() for line in data.decode().splitlines()]
        keys = [pyrage.x25519.Identity.from_str(line) for line in lines if line and line[0] != "#"]
    except (pyrage.IdentityError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} holds no age identity that kvdb can use.") from error
    if not keys:
        raise UsageError(f"{path} holds no age identity.")
    return keys


@contextmanager
def plain(source: Readable, keys: Keys) -> Iterator[Readable]:
    """The plain bytes of a stream that may be encrypted. Raises SnapshotRejected, here or while it
    is read, for a wrong key or changed bytes."""
    start = bytearray()
    while len(start) < MAGIC_BYTES:
        piece = memoryview(bytearray(MAGIC_BYTES - len(start)))
        count = source.readinto(piece)
        if not count:
            break
        start += piece[:count]
    rest = _Rest(bytes(start), source)
    if start.startswith((AGE_MAGIC, SEALED_MAGIC)):
        with _decrypted(bytes(start), rest, keys) as readable:
            yield readable
    else:
        yield rest


@contextmanager
def _decrypted(start: bytes, rest: _Rest, keys: Keys) -> Iterator[Readable]:
    pyrage = require_pyrage()
    identities = list(keys.identities)
    if start.startswith(SEALED_MAGIC):
        identities = [_sealed_key(rest, keys.passphrase)]
    elif not identities:
        raise SnapshotRejected(
            "The data is encrypted; give the identity that it was encrypted for."
        )
    reading, writing = os.pipe()
    readable = _Plain(reading)

    def decrypt() -> None:
        with open(writing, "wb", buffering=0) as pipe:  # noqa: PTH123 - a descriptor
            try:
                pyrage.decrypt_io(rest, _Sink(pipe), identities)
            except (pyrage.DecryptError, OSError) as error:
                readable.error = error

    thread = threading.Thread(target=decrypt, name="kvdb-decrypt", daemon=True)
    readable.thread = thread
    thread.start()
    try:
        yield readable
    finally:
        readable.close()  # a thread that is still writing meets a closed pipe
        thread.join()


def _sealed_key(rest: _Rest, passphrase: str | None) -> Any:
    if passphrase is None:
        raise SnapshotRejected("The data is encrypted under a passphrase; give that.")
    pyrage = require_pyrage()
    line = rest.line(len(SEALED_MAGIC) + 8)
    length = line[len(SEALED_MAGIC) :].strip()
    if not length.isdigit() or int(length) > MAX_KEY_BYTES:
        raise SnapshotRejected("The first line of the encrypted data is damaged.")
    try:
        key = pyrage.passphrase.decrypt(rest.exactly(int(length)), passphrase)
        return pyrage.x25519.Identity.from_str(key.decode())
    except (pyrage.DecryptError, pyrage.IdentityError, UnicodeDecodeError) as error:
        raise SnapshotRejected(WRONG_KEY) from error


class _Plain:
    """The reading end of a pipe that a thread decrypts into."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = io.FileIO(descriptor, "rb")
        self._begun = False
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def readinto(self, buffer: memoryview, /) -> int | None:
        count = self._pipe.readinto(buffer)
        if not count and self.thread is not None and len(buffer):
            self.thread.join()
            if self.error is not None:
                why = "The encrypted data is damaged or cut short." if self._begun else WRONG_KEY
                raise SnapshotRejected(why) from self.error
        self._begun = True
        return count

    def close(self) -> None:
        self._pipe.close()


class _Rest(io.RawIOBase):
    """A file of which the first bytes were read already."""

    def __init__(self, start: bytes, source: Readable) -> None:
        self._start = start
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        if not self._start:
            return self._source.readinto(memoryview(buffer))
        view = memoryview(buffer).cast("B")
        count = min(len(self._start), len(view))
        view[:count] = self._start[:count]
        self._start = self._start[count:]
        return count

    def line(self, most: int) -> bytes:
        data = b""
        while len(data) < most and not data.endswith(b"\n"):
            data += self.exactly(1)
        return data

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.read(size - len(data))  # RawIOBase: by readinto
            if not piece:
                raise SnapshotRejected("The encrypted data is cut short.")
            data += piece
        return data


class _Source(io.RawIOBase):
    """Buffers as a file to be read."""

    def __init__(self, buffers: Iterator[memoryview]) -> None:
        self._buffers = buffers
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        while not self._rest:
            try:
                self._rest = next(self._buffers).cast("B")
            except StopIteration:
                return b""
        data, self._rest = self._rest[:size], self._rest[size:]
        return bytes(data)


class _Sink(io.RawIOBase):
    """A file that takes all it is given."""

    def __init__(self, target: Writable) -> None:
        self._target = target

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return write_whole(self._target, memoryview(data))


def write_whole(target: Writable, data: memoryview) -> int:
    """Write all of ``data``; short writes are resumed. Returns its bytes."""
    left = data.cast("B")
    while left:
        left = left[target.write(left) or 0 :]
    return data.nbytes


def parse_recipient(text: str) -> Any:
    pyrage = require_pyrage()
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text.strip())
    except pyrage.RecipientError as error:
        raise UsageError(f"{text!r} is no age recipient (age1… or an SSH public key).") from error


def require_pyrage() -> Any:
    try:
        import pyrage
    except ImportError as error:
        raise UsageError("Encryption needs pyrage, which is not installed.") from error
    return pyrage
