"""Encryption around a remote: objects leave this machine encrypted, and are decrypted here.

Keys of objects stay what they are: a remote sees which prompts are equal, never what they say.
Under a passphrase the remote holds, beside the objects, one key that the passphrase opens: an age
identity in ``v1/key.age``, for which all objects are encrypted. Whoever adds the remote first makes
it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kvdb.config import secret_variable
from kvdb.encryption import (
    AGE_MAGIC,
    MAX_KEY_BYTES,
    parse_recipient,
    read_identities,
    require_pyrage,
)
from kvdb.errors import UsageError
from kvdb.remotes.naming import ROOT
from kvdb.remotes.remote import Get, Got, Listed, Put, PutState, Remote, RemoteConfig, RemoteRefused

PASSPHRASE = "passphrase"  # noqa: S105 - a word of the option
KEY_OBJECT = f"{ROOT}key.age"
# Encrypted objects are larger: a header with some 100 to 1,000 bytes for each recipient, and 16
# bytes for each 64 KiB.
HEADER_BYTES = 4096
RECIPIENT_BYTES = 2048
MOST_RECIPIENTS = 100
CHUNK_BYTES, TAG_BYTES = 64 << 10, 16
# Encrypted objects in memory at once; one that is larger comes alone.
SCRATCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Seal:
    """For whom objects are encrypted, and what opens them. Either ``recipients`` or a
    ``passphrase``; without ``identities`` what is encrypted for recipients cannot be read here."""

    name: str
    recipients: tuple[Any, ...] = ()
    identities: tuple[Any, ...] = ()
    passphrase: str | None = None

    @classmethod
    def of(cls, config: RemoteConfig) -> Seal:
        """What the option ``encrypt`` and the secrets say. Raises UsageError."""
        option = config.options["encrypt"]
        if option == PASSPHRASE:
            passphrase = config.secrets.get("passphrase")
            if passphrase is None:
                raise UsageError(
                    f"The remote is encrypted under a passphrase: set "
                    f"{secret_variable(config.name, 'passphrase')}."
                )
            return cls(config.name, passphrase=passphrase)
        identity = config.secrets.get("identity")
        try:
            keys = () if identity is None else tuple(read_identities(Path(identity)))
        except OSError as error:
            raise UsageError(
                f"{secret_variable(config.name, 'identity')} names a file that cannot be read: "
                f"{error.strerror}."
            ) from error
        return cls(config.name, _recipients(option), keys)

    def around(self, remote: Remote) -> SealedRemote:
        return SealedRemote(remote, self)


class SealedRemote:
    """See :class:`kvdb.remotes.remote.Remote`. What is there and is not encrypted is refused: a
    remote must not be able to say that it holds plain objects."""

    def __init__(self, inner: Remote, seal: Seal) -> None:
        self._inner = inner
        self._seal = seal
        self._lock = threading.Lock()
        self._key: Any = None

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        return self._inner.exists_many(keys)

    def get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        overhead = HEADER_BYTES + RECIPIENT_BYTES * max(1, len(self._seal.recipients))
        sizes = [get.buffer.nbytes + overhead + _tags(get.buffer.nbytes) for get in gets]
        for first, end in _windows(sizes):
            scratch = [np.empty(size, np.uint8).data for size in sizes[first:end]]
            keys = [get.key for get in gets[first:end]]
            for got in self._inner.get_many(list(map(Get, keys, scratch))):
                number = first + got.index
                if got.nbytes is None:
                    yield Got(number, None, got.problem)
                else:
                    data = scratch[got.index][: got.nbytes]
                    yield self._open(number, data, gets[number].buffer)

    def put_many(self, puts: Sequence[Put]) -> list[PutState]:
        if not puts:
            return []
        recipients = self._recipients()
        sealed = [
            Put(
                put.key,
                [memoryview(require_pyrage().encrypt(b"".join(put.buffers), recipients))],
                put[2],
            )
            for put in puts
        ]
        return self._inner.put_many(sealed)

    def list(self, prefix: str) -> Iterator[Listed]:
        """Sizes are those of the encrypted objects: more than what is in them."""
        for listed in self._inner.list(prefix):
            if listed.key != KEY_OBJECT:
                yield listed

    def close(self) -> None:
        self._inner.close()

    def _open(self, number: int, data: memoryview, into: memoryview) -> Got:
        if bytes(data[: len(AGE_MAGIC)]) != AGE_MAGIC:
            return Got(number, None, "not encrypted")
        try:
            plain = require_pyrage().decrypt(bytes(data), self._identities())
        except require_pyrage().DecryptError as error:
            other = "No matching keys" in str(error)
            return Got(number, None, "encrypted for another key" if other else "does not decrypt")
        if len(plain) > into.nbytes:
            return Got(number, None, "too large")
        into[: len(plain)] = plain
        return Got(number, len(plain))

    def _identities(self) -> Sequence[Any]:
        if self._seal.passphrase is not None:
            return [self._shared_key(make=False)]
        if not self._seal.identities:
            raise RemoteRefused(
                f"The remote {self._seal.name} is encrypted: set "
                f"{secret_variable(self._seal.name, 'identity')} to the file of an age identity."
            )
        return self._seal.identities

    def _recipients(self) -> Sequence[Any]:
        if self._seal.passphrase is None:
            return self._seal.recipients
        return [self._shared_key(make=True).to_public()]

    def _shared_key(self, *, make: bool) -> Any:
        """The key that the passphrase opens; all machines use the one that is there."""
        with self._lock:
            if self._key is None:
                text = self._read_key(make)
                self._key = require_pyrage().x25519.Identity.from_str(text)
            return self._key

    def _read_key(self, make: bool) -> str:
        locked = self._fetch_key()
        if locked is None and make:
            new = str(require_pyrage().x25519.Identity.generate())
            mine = bytes(require_pyrage().passphrase.encrypt(new.encode(), self._passphrase))
            self._inner.put_many([Put(KEY_OBJECT, [memoryview(mine)])])
            locked = self._fetch_key()
            if locked == mine:
                return new
            # Another machine was first.
        if locked is None:
            raise RemoteRefused(
                f"The key of the remote {self._seal.name} ({KEY_OBJECT}) is not there, so what it "
                "holds cannot be read."
            )
        return _unlocked_key(locked, self._passphrase, self._seal.name)

    @property
    def _passphrase(self) -> str:
        return self._seal.passphrase or ""

    def _fetch_key(self) -> bytes | None:
        """None where there is none; an answer that may mean something else is an error, so that no
        second key is made."""
        buffer = bytearray(MAX_KEY_BYTES)
        for got in self._inner.get_many([Get(KEY_OBJECT, memoryview(buffer))]):
            if got.nbytes is not None:
                return bytes(buffer[: got.nbytes])
            if got.problem is not None:
                raise RemoteRefused(
                    f"The key of the remote {self._seal.name} cannot be read: {got.problem}."
                )
        return None


# scrypt takes a second or more, on purpose: once in a process is enough.
@lru_cache(maxsize=16)
def _unlocked_key(locked: bytes, passphrase: str, name: str) -> str:
    try:
        text = require_pyrage().passphrase.decrypt(locked, passphrase).decode()
        require_pyrage().x25519.Identity.from_str(text)
    except (
        require_pyrage().DecryptError,
        require_pyrage().IdentityError,
        UnicodeDecodeError,
    ) as error:
        raise RemoteRefused(
            f"The remote {name} is encrypted under another passphrase than "
            f"{secret_variable(name, 'passphrase')}, or its key is damaged."
        ) from error
    return str(text)


def _recipients(option: str) -> tuple[Any, ...]:
    """Recipients from the option: a JSON list of them."""
    try:
        texts = json.loads(option)
    except (ValueError, RecursionError):
        texts = None
    if (
        not isinstance(texts, list)
        or not 0 < len(texts) <= MOST_RECIPIENTS
        or not all(isinstance(text, str) for text in texts)
    ):
        raise UsageError(
            'The option encrypt is "passphrase", or a JSON list of age recipients; see --encrypt.'
        )
    return tuple(parse_recipient(text) for text in texts)


def _windows(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut into runs that fit into the scratch memory, or have one member."""
    first = used = 0
    for number, size in enumerate(sizes):
        if number > first and used + size > SCRATCH_BYTES:
            yield first, number
            first, used = number, 0
        used += size
    if sizes:
        yield first, len(sizes)


def _tags(nbytes: int) -> int:
    return TAG_BYTES * (nbytes // CHUNK_BYTES + 2)
