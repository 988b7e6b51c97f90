"""Ways to damage or forge a snapshot."""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
import tarfile
from collections.abc import Callable, Sequence

Members = list[tuple[str, bytes]]


def members(data: bytes) -> Members:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = []
        for info in tar:
            file = tar.extractfile(info)
            assert file is not None
            found.append((info.name, file.read()))
        return found


def tar_of(parts: Sequence[tuple[str, bytes] | bytes]) -> bytes:
    """A tar of members; bytes among them go in as they are."""
    data = b""
    for part in parts:
        if isinstance(part, bytes):
            data += part
            continue
        name, content = part
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(content), 0o400
        data += info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)
    return data + bytes(1024)


def signed(parts: Members) -> bytes:
    """A tar of members, with a list of digests that fits them: what a forger can make."""
    kept = [part for part in parts if part[0] != "SHA256SUMS"]
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in kept)
    return tar_of([*kept, ("SHA256SUMS", sums.encode())])


def mutate(good: bytes, choose: random.Random) -> bytes:
    """One of many small changes, to the bytes or (then with digests that fit) to the members."""
    if choose.random() < 0.6:
        return _change_bytes(good, choose)
    parts = members(good)[:-1]
    kind = choose.choice(("bytes", "drop", "twice", "swap", "name", "manifest", "head"))
    at = choose.randrange(len(parts))
    name, content = parts[at]
    if kind == "bytes":
        # Not in the bytes of a part: their checksum is no secret, so a forger could fit it.
        parts[at] = name, _change_bytes(content, choose)
    elif kind == "drop":
        del parts[at]
    elif kind == "twice":
        parts.insert(choose.randrange(len(parts) + 1), parts[at])
    elif kind == "swap":
        other = choose.randrange(len(parts))
        parts[at], parts[other] = parts[other], parts[at]
    elif kind == "name":
        other = choose.choice(
            ("../evil", "/etc/passwd", "blocks/9/x", name.upper(), name + "\u0301", name[:-1])
        )
        parts[at] = other, content
    elif kind == "manifest":
        parts[0] = parts[0][0], change_json(parts[0][1], choose)
    elif at:
        parts[at] = name, _change_head(content, choose)
    try:
        return signed(parts)
    except (UnicodeEncodeError, ValueError):
        return good[:-1]


def _change_bytes(data: bytes, choose: random.Random) -> bytes:
    """Never the bytes that came in."""
    changed = bytearray(data)
    at = choose.randrange(len(data))
    length = min(choose.choice((1, 8, 512, 700)), len(data) - at)
    kind = choose.choice(("bit", "cut", "zero", "insert", "delete", "repeat", "random"))
    if kind == "bit":
        changed[at] ^= 1 << choose.randrange(8)
    elif kind == "cut":
        del changed[at:]
    elif kind == "zero":
        changed[at : at + length] = bytes(length)
    elif kind == "insert":
        changed[at:at] = choose.randbytes(length)
    elif kind == "delete":
        del changed[at : at + length]
    elif kind == "repeat":
        changed[at:at] = changed[at : at + length]
    else:
        changed[at : at + length] = choose.randbytes(length)
    return bytes(changed) if changed != data else data + b"\0"


WORSE: tuple[object, ...] = (
    None,
    -1,
    0,
    1 << 63,
    1.5,
    True,
    "",
    "../x",
    "\ud800",
    "x" * 1000,
    [],
    {},
    [[[]]],
)


def change_json(data: bytes, choose: random.Random) -> bytes:
    """The document with one value of it replaced, in canonical form."""
    document = json.loads(data)
    at, key = document, None
    while isinstance(at, dict | list) and at:
        holder = at
        key = choose.choice(list(at) if isinstance(at, dict) else range(len(at)))
        at = at[key]
        if choose.random() < 0.3:
            break
    holder[key] = choose.choice(WORSE)
    return canonical(document) + b"\n"


def canonical(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _change_head(member: bytes, choose: random.Random) -> bytes:
    """A block's member with one value of its description replaced, and its header made to fit."""
    return with_head(
        member, lambda described: json.loads(change_json(canonical(described), choose))
    )


def with_head(member: bytes, change: Callable[[dict], dict]) -> bytes:
    (length,) = struct.unpack("<Q", member[:8])
    header = json.loads(member[8 : 8 + length])
    described = change(json.loads(header["__metadata__"]["kvdb"]))
    header["__metadata__"]["kvdb"] = canonical(described).decode()
    text = canonical(header)
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text + member[8 + length :]
