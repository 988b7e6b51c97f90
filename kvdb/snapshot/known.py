"""Which of a snapshot's key spaces the store has, and how the others differ from those it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvdb.driver import Connection
from kvdb.explain.keyspaces import KeySpace, differences, key_spaces
from kvdb.shards import NamespaceRecord


@dataclass(frozen=True, slots=True)
class NamespaceNote:
    """One namespace of a snapshot. Identity is the model's content: a moved or renamed model is
    known. ``differs`` says in what a namespace that is not known differs from the store's nearest
    one; it is stored all the same, for a model of that content."""

    model: str
    fingerprint: str
    known: bool
    differs: tuple[str, ...] = ()


def compare_namespaces(
    connection: Connection, records: Sequence[NamespaceRecord]
) -> list[NamespaceNote]:
    spaces = key_spaces(connection)
    known = {space.fingerprint for space in spaces}
    return [
        NamespaceNote(
            record.model,
            record.fingerprint.hex(),
            record.fingerprint in known,
            () if record.fingerprint in known else _nearest(record, spaces),
        )
        for record in records
    ]


def _nearest(record: NamespaceRecord, spaces: Sequence[KeySpace]) -> tuple[str, ...]:
    own = KeySpace.of(record)
    found = [tuple(text for _, text in differences(space, own)) for space in spaces]
    return min(found, key=len) if found else ()
