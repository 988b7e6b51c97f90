"""The parts of a prompt, as ``requests.segments`` keeps them: messages, tools, the system prompt.

In JSON: a list of ``{"kind", "role", "index", "name", "end", "digest", "count"}``, in order,
without what does not apply. ``end`` is the number of prompt tokens up to the end of that part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvdb.identity import canonical_json

# Longer texts are not kept in history; a part takes about 90 bytes.
MAX_SEGMENTS = 300
KEPT_HEAD, KEPT_TAIL = 100, 160
MAX_NAME = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a prompt.

    ``kind`` is ``system``, ``tool``, ``message``, ``template`` (text that belongs to none of
    these), ``text`` or ``tokens`` (a prompt without parts). ``index`` counts from 0 in the
    request's messages or tools. ``digest`` is that of the content, whatever it is rendered to;
    equal digests mean equal content. ``count`` parts were folded into this one.
    """

    kind: str
    end: int
    role: str | None = None
    index: int | None = None
    name: str | None = None
    digest: str | None = None
    count: int = 1

    def title(self, tools: int | None = None) -> str:
        """What people call it: ``message 12 (user)``, ``tool 3 of 7 (search)``."""
        number = "" if self.index is None else f" {self.index + 1}"
        if self.count > 1:
            number = f"s{number} to {(self.index or 0) + self.count}"
        if self.kind == "tool":
            of = "" if tools is None else f" of {tools}"
            return f"tool{number}{of}" + (f" ({self.name})" if self.name else "")
        if self.kind == "message":
            return f"message{number}" + (f" ({self.role})" if self.role and self.count == 1 else "")
        return {
            "system": "system prompt",
            "template": "text of the chat template",
            "text": "prompt text",
            "tokens": "prompt tokens",
        }.get(self.kind, self.kind)


KEYS = {field.name for field in fields(Segment)}


def content_digest(content: object) -> str:
    """Short digest of a message, a tool, or text: the order of JSON keys takes no part."""
    text = content if isinstance(content, str) else canonical_json(content)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def last_question(segments: Sequence[Segment]) -> int:
    """The token at which the last user's message begins, or the last message where no user spoke;
    0 where there is none."""
    starts = [0, *(segment.end for segment in segments)]
    messages = [
        (start, segment.role)
        for start, segment in zip(starts, segments, strict=False)
        if segment.kind == "message"
    ]
    asked = [start for start, role in messages if role == "user"]
    return max(asked or [start for start, _ in messages], default=0)


def dump_segments(segments: Sequence[Segment]) -> str | None:
    """The text for ``requests.segments``; None where there are none."""
    rows = [_row(segment) for segment in fold(segments)]
    return json.dumps(rows, separators=(",", ":")) if rows else None


def load_segments(text: str | None) -> list[Segment]:
    """Invert :func:`dump_segments`. What is not a segment is left out: the column is history, and
    history may be cut or foreign."""
    if text is None:
        return []
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return as_segments(rows) if isinstance(rows, list) else []


def as_segments(rows: Iterable[Segment | Mapping[str, Any]]) -> list[Segment]:
    """Segments from objects or JSON rows; what is neither is left out."""
    return [
        row if isinstance(row, Segment) else Segment(**{key: row[key] for key in KEYS & row.keys()})
        for row in rows
        if isinstance(row, Segment) or _is_row(row)
    ]


def _is_row(row: object) -> bool:
    if not isinstance(row, Mapping):
        return False
    texts = (row.get(key) for key in ("role", "name", "digest"))
    numbers = (row.get("end"), row.get("index", 0), row.get("count", 1))
    return (
        isinstance(row.get("kind"), str)
        and all(isinstance(text, str | None) for text in texts)
        and all(type(number) is int and 0 <= number < 1 << 32 for number in numbers)
    )


def fold(segments: Sequence[Segment]) -> list[Segment]:
    """At most MAX_SEGMENTS of them: head and tail as they are, the middle in groups."""
    if len(segments) <= MAX_SEGMENTS:
        return list(segments)
    middle = segments[KEPT_HEAD:-KEPT_TAIL]
    size = -(-len(middle) // (MAX_SEGMENTS - KEPT_HEAD - KEPT_TAIL))
    folded = []
    for start in range(0, len(middle), size):
        group = middle[start : start + size]
        digest = content_digest([segment.digest for segment in group])
        count = sum(segment.count for segment in group)
        folded.append(replace(group[0], end=group[-1].end, digest=digest, count=count))
    return [*segments[:KEPT_HEAD], *folded, *segments[-KEPT_TAIL:]]


def _row(segment: Segment) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": segment.kind}
    if segment.role is not None and segment.kind == "message":
        row["role"] = segment.role[:MAX_NAME]
    if segment.index is not None:
        row["index"] = segment.index
    if segment.name is not None:
        row["name"] = segment.name[:MAX_NAME]
    row["end"] = segment.end
    if segment.digest is not None:
        row["digest"] = segment.digest
    if segment.count > 1:
        row["count"] = segment.count
    return row
