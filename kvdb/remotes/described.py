"""``namespace.json``: what the blocks of a namespace are of, checked by whoever reads it."""

from __future__ import annotations

import json

from kvdb.errors import IntegrityError
from kvdb.identity import canonical_json
from kvdb.remotes.naming import namespace_key
from kvdb.remotes.remote import Get, Remote
from kvdb.shards import MALFORMED, NamespaceRecord
from kvdb.snapshot.manifest import parse_namespace

MAX_BYTES = 256 << 10


def namespace_object(record: NamespaceRecord) -> bytes:
    """The bytes of ``namespace.json``."""
    return canonical_json(record.abroad().to_document()).encode()


def fetch_namespace(remote: Remote, fingerprint: bytes) -> NamespaceRecord | None:
    """A namespace as the remote describes it; None where it does not. Its fingerprint follows from
    the description. Raises IntegrityError for a description that is none."""
    buffer = bytearray(MAX_BYTES)
    for got in remote.get_many([Get(namespace_key(fingerprint), memoryview(buffer))]):
        if got.nbytes is not None:
            return _parse(bytes(buffer[: got.nbytes]), fingerprint)
        if got.problem is not None:
            raise IntegrityError(got.problem)
    return None


def _parse(data: bytes, fingerprint: bytes) -> NamespaceRecord:
    try:
        record = parse_namespace(json.loads(data))
    except MALFORMED as error:
        raise IntegrityError(f"It is no namespace ({type(error).__name__}).") from error
    if record.fingerprint != fingerprint:
        raise IntegrityError("It describes another namespace than its key says.")
    return record
