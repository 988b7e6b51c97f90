"""The manifest: what a snapshot holds, before the blocks themselves."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kvdb.codecs import CODECS
from kvdb.errors import IntegrityError, SnapshotRejected
from kvdb.identity import canonical_json
from kvdb.shards import MALFORMED, NamespaceRecord

FORMAT = 1
KIND = "kvdb snapshot"
MAX_BYTES = 4 << 20
MAX_TEXT = 500
MAX_INTEGER = 1 << 62


@dataclass(frozen=True, slots=True)
class NamedTip:
    """A named sequence: the block it holds, by the number of its namespace and its hash.
    ``expires_at`` is in Unix µs."""

    name: str
    namespace: int
    tip: bytes
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class BuildNote:
    """A build that computed blocks: digest, and its description in JSON."""

    namespace: int
    digest: str
    description: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """``namespaces`` in order of their fingerprints; others name one by its number. ``codecs`` are
    those of the parts, with their parameters. ``recoded`` is the codec that the export was told to
    use. Without ``tokens`` those of some blocks are withheld. ``blocks`` and ``raw_bytes`` are what
    was chosen: what went meanwhile is missing."""

    namespaces: tuple[NamespaceRecord, ...]
    builds: tuple[BuildNote, ...]
    codecs: Mapping[str, Mapping[str, Any]]
    sequences: tuple[NamedTip, ...]
    tokens: bool
    recoded: str | None
    blocks: int
    raw_bytes: int

    def encode(self) -> bytes:
        document = {
            "kind": KIND,
            "format": FORMAT,
            "namespaces": [record.to_document() for record in self.namespaces],
            "builds": [
                {
                    "namespace": build.namespace,
                    "digest": build.digest,
                    "description": json.loads(build.description),
                }
                for build in self.builds
            ],
            "codecs": {name: dict(self.codecs[name]) for name in self.codecs},
            "sequences": [
                {
                    "name": sequence.name,
                    "namespace": sequence.namespace,
                    "tip": sequence.tip.hex(),
                    "expires_at": sequence.expires_at,
                }
                for sequence in self.sequences
            ],
            "tokens": self.tokens,
            "recoded": self.recoded,
            "blocks": self.blocks,
            "raw_bytes": self.raw_bytes,
        }
        return canonical_json(document).encode() + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Raises SnapshotRejected for anything that :meth:`encode` does not give."""
        try:
            document = json.loads(data)
            if document["kind"] != KIND:
                raise SnapshotRejected("This is not a kvdb snapshot.")
            if type(document["format"]) is not int or document["format"] < 1:
                raise SnapshotRejected("The snapshot has no format.")
            if document["format"] > FORMAT:
                raise SnapshotRejected(
                    f"The snapshot has format {document['format']:.8g}, this program reads up to "
                    f"{FORMAT}; upgrade kvdb."
                )
            manifest = _parse(document)
            canonical = manifest.encode()
        except MALFORMED as error:
            raise SnapshotRejected(
                f"The snapshot's manifest is wrong ({type(error).__name__})."
            ) from error
        except SnapshotRejected:
            raise
        except IntegrityError as error:
            raise SnapshotRejected(f"The snapshot's manifest is wrong: {error!s:.300}") from error
        if canonical != data:
            raise SnapshotRejected("The snapshot's manifest is not in canonical form.")
        unknown = sorted(set(manifest.codecs) - set(CODECS))
        if unknown:
            raise SnapshotRejected(
                f"The snapshot needs the codec {unknown[0]!r:.80}, which is not known here."
            )
        return manifest


def _parse(document: dict[str, Any]) -> Manifest:
    records = tuple(parse_namespace(item) for item in document["namespaces"])
    fingerprints = [record.fingerprint for record in records]
    if fingerprints != sorted(set(fingerprints)):
        raise SnapshotRejected("The snapshot's namespaces are out of order.")
    if not (type(document["tokens"]) is bool and isinstance(document["codecs"], dict)):
        raise SnapshotRejected("The snapshot's manifest has values of wrong types.")
    if document["recoded"] is not None:
        _text(document["recoded"])
    return Manifest(
        records,
        tuple(
            BuildNote(
                _number(item["namespace"], len(records)),
                _text(item["digest"]),
                canonical_json(item["description"]),
            )
            for item in document["builds"]
        ),
        {_text(name): dict(parameters) for name, parameters in document["codecs"].items()},
        tuple(
            NamedTip(
                _text(item["name"]),
                _number(item["namespace"], len(records)),
                _hash(item["tip"]),
                None if item["expires_at"] is None else _number(item["expires_at"], MAX_INTEGER),
            )
            for item in document["sequences"]
        ),
        document["tokens"],
        document["recoded"],
        _number(document["blocks"], MAX_INTEGER),
        _number(document["raw_bytes"], MAX_INTEGER),
    )


def parse_namespace(document: dict[str, Any]) -> NamespaceRecord:
    """A namespace from elsewhere; its fingerprint follows from the rest. Raises IntegrityError, or
    one of MALFORMED."""
    record = NamespaceRecord.from_document(document)
    _texts(record.model, record.identity.weights, record.identity.config)
    _texts(*record.identity.adapters)
    for text in (record.build, record.identity.code):
        if text is not None:
            _text(text)
    return record


def _texts(*values: object) -> None:
    for value in values:
        _text(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise SnapshotRejected("The snapshot's manifest has a name that is none.")
    value.encode()  # ValueError for half a character
    return value


def _number(value: object, end: int) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise SnapshotRejected("The snapshot's manifest has a number out of range.")
    return value


def _hash(value: str) -> bytes:
    digest = bytes.fromhex(value)
    if len(digest) != 32:
        raise SnapshotRejected("The snapshot's manifest names a block that there cannot be.")
    return digest


def codec_notes(names: Collection[str]) -> dict[str, dict[str, Any]]:
    """``Manifest.codecs`` of these codecs; none of today's has parameters."""
    return {name: {} for name in sorted(names)}
