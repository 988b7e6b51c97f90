"""Members: one block as canonical bytes, and what is refused."""

from __future__ import annotations

import json
import struct

import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdb import index
from kvdb.codecs import CODECS
from kvdb.errors import IntegrityError
from kvdb.members import Member, parse_member, read_member
from kvdb.store import Store
from tests.support import MIXED, PLAIN, open_namespace, payloads, put_all, random_tokens


def members(store: Store, layout=MIXED) -> list[Member]:
    namespace = open_namespace(store, layout)
    put_all(store, namespace, random_tokens(1, 40))
    with store.database.read() as connection:
        record = index.namespace_record(connection, namespace.id)
        ids = [row[0] for row in connection.execute("SELECT id FROM blocks ORDER BY depth")]
    found = [read_member(store, record, block_id) for block_id in ids]
    assert all(found)
    return [member for member in found if member is not None]


def data(member: Member) -> bytes:
    return b"".join(member.encode())


@pytest.mark.parametrize("layout", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_round_trip(store: Store, layout) -> None:
    for member in members(store, layout):
        for other in (
            member,
            member.without_tokens(),
            *(member.recoded(c) for c in CODECS.values()),
        ):
            encoded = data(other)
            parsed = parse_member(encoded, member.record)
            assert data(parsed) == encoded
            assert [bytes(parsed.raw(part)) for part in parsed.parts] == [
                bytes(member.raw(part)) for part in member.parts
            ]
            # Any safetensors reader opens it, and the data lies aligned.
            names = {name for name, _ in safetensors.deserialize(encoded)}
            assert names >= {part.part for part in member.parts}
            assert struct.unpack("<Q", encoded[:8])[0] % 64 == 56


def test_same_content_same_bytes(store: Store, tmp_path) -> None:
    """Whatever shard, order and neighbours a block was stored with."""
    import kvdb

    first = members(store)
    with kvdb.open(tmp_path / "other") as other:
        namespace = open_namespace(other, MIXED)
        put_all(other, namespace, random_tokens(9, 16))
        tokens = random_tokens(1, 40)
        for end in (16, 32, 40):
            parts = payloads(namespace, tokens[:end], end // 16 - (end % 16 == 0))
            if end < 40:
                parts = payloads(namespace, tokens[:end], end // 16 - 1, optional=False)
            assert other.put(namespace, tokens[:end], parts).wait(30).dropped == 0
        assert {data(m) for m in first} <= {data(m) for m in members(other)}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_bit_is_refused(choose: st.DataObject) -> None:
    encoded, record = _example()
    damaged = bytearray(encoded)
    at = choose.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[at // 8] ^= 1 << at % 8
    with pytest.raises(IntegrityError):
        parse_member(bytes(damaged), record)


_EXAMPLE: list[tuple[bytes, object]] = []


def _example():
    import tempfile
    from pathlib import Path

    import kvdb

    if not _EXAMPLE:
        with tempfile.TemporaryDirectory() as folder, kvdb.open(Path(folder) / "s") as store:
            member = members(store)[-1]
            _EXAMPLE.append((data(member), member.record))
    return _EXAMPLE[0]


def rewritten(encoded: bytes, change) -> bytes:
    """The member with its header's JSON changed."""
    (length,) = struct.unpack("<Q", encoded[:8])
    header = json.loads(encoded[8 : 8 + length])
    described = json.loads(header["__metadata__"]["kvdb"])
    change(header, described)
    header["__metadata__"]["kvdb"] = json.dumps(described, sort_keys=True, separators=(",", ":"))
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text + encoded[8 + length :]


def other_tokens(encoded: bytes) -> bytes:
    (length,) = struct.unpack("<Q", encoded[:8])
    start, _ = json.loads(encoded[8 : 8 + length])["tokens"]["data_offsets"]
    changed = bytearray(encoded)
    changed[8 + length + start] ^= 1
    return bytes(changed)


HOSTILE = {
    "other tokens": other_tokens,
    "huge header": lambda e: struct.pack("<Q", 1 << 62) + e[8:],
    "header beyond the end": lambda e: struct.pack("<Q", len(e)) + e[8:],
    "empty": lambda e: b"",
    "one byte": lambda e: e[:1],
    "trailing bytes": lambda e: e + b"\0",
    "cut": lambda e: e[:-1],
    "deep JSON": lambda e: struct.pack("<Q", 9992) + b"[" * 9992,
    "not JSON": lambda e: struct.pack("<Q", 8) + b"\xff" * 8,
    "unknown format": lambda e: rewritten(e, lambda h, d: d.update(format=2)),
    "huge part": lambda e: rewritten(e, lambda h, d: d["parts"][0].__setitem__(2, 1 << 62)),
    "unknown codec": lambda e: rewritten(e, lambda h, d: d["parts"][0].__setitem__(1, "pickle")),
    "many parts": lambda e: rewritten(e, lambda h, d: d.update(parts=d["parts"] * 3000)),
    "other depth": lambda e: rewritten(e, lambda h, d: d.update(depth=7)),
    "float depth": lambda e: rewritten(e, lambda h, d: d.update(depth=2.0)),
    "overlap": lambda e: rewritten(e, lambda h, d: h["kv:0"].update(data_offsets=[0, 1])),
    "foreign tensor": lambda e: rewritten(
        e, lambda h, d: h.update({"../x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}})
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    encoded, record = _example()
    assert parse_member(encoded, record) is not None
    with pytest.raises(IntegrityError):
        parse_member(HOSTILE[name](encoded), record)
