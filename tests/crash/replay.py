"""What a disk may hold after a power cut, from the system calls of a real run.

``record`` runs a worker under strace and parses every change of a file or folder, SQLite's own
included. ``Disk`` plays a prefix of them and writes down a state that the cut may have left: what
was synced is there; each later write of a file is there, lost or torn at 512 bytes or 4 KiB, in no
order; of the later entries of each folder a prefix is there.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.zygote import Worker, Zygote

CALLS = (
    "openat,write,writev,pwrite64,pwritev,fsync,fdatasync,ftruncate,fallocate,"
    "rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat"
)
LINE = re.compile(r"(?P<pid>\d+) +(?P<rest>.*)")
CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\) += +(?P<result>-?\d+)")
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
FD = re.compile(r"(\d+)<((?:\\x[0-9a-f]{2})*)>")
DELETED = "".join(f"\\x{byte:02x}" for byte in b" (deleted)")
# What a disk writes at once.
SECTORS = (512, 4096)


@dataclass(frozen=True, slots=True)
class Event:
    """One change. ``kind`` is write, cut, sync, create, mkdir, link, rename, unlink or said."""

    kind: str
    path: str
    target: str = ""
    offset: int = 0
    data: bytes = b""


def record(zygote: Zygote, operation: str, path: Path, log: Path, **arguments: object) -> None:
    """Run an operation of ``tests.crash.worker`` to its end under strace, which writes ``log``."""
    worker = zygote.start(operation, path, **arguments)
    worker.expect("ready")
    options = ["-f", "-y", "-xx", "-s", str(1 << 22), "-o", str(log), "-e", f"trace={CALLS}"]
    _trace(worker, options)
    assert worker.wait() == 0


def _trace(worker: Worker, options: list[str]) -> None:
    process = subprocess.Popen(
        ["strace", *options, "-p", str(worker.pid)],  # noqa: S607
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "attached" not in (line := process.stderr.readline()):
        assert line, "strace does not attach"
    worker.say()
    assert worker.rest()[-1] == "done"
    process.communicate(timeout=60)


def _text(escaped: str) -> bytes:
    return bytes.fromhex(escaped.replace("\\x", ""))


def _calls(log: str) -> Iterator[tuple[str, str, int]]:
    """(name, arguments, result) of every call that succeeded, in order of their ends."""
    begun: dict[str, str] = {}
    for line in log.splitlines():
        match = LINE.fullmatch(line)
        if match is None:
            continue
        pid, rest = match["pid"], match["rest"]
        if rest.endswith("<unfinished ...>"):
            begun[pid] = rest.removesuffix("<unfinished ...>").rstrip()
            continue
        resumed = re.match(r"<\.\.\. \w+ resumed>", rest)
        if resumed is not None:
            rest = begun.pop(pid) + rest[resumed.end() :]
        call = CALL.match(rest)
        if call is not None and int(call["result"]) >= 0:
            yield call["name"], call["arguments"], int(call["result"])


def parse(log: str, root: Path) -> list[Event]:
    """The changes under ``root``'s parent, with paths relative to it, and what was said."""
    base = root.parent
    positions: dict[str, int] = {}
    existing: set[str] = set()
    events: list[Event] = []

    def inside(name: bytes) -> str | None:
        path = Path(name.decode())
        return str(path.relative_to(base)) if path == base or base in path.parents else None

    for name, arguments, result in _calls(log):
        fd = FD.match(arguments)
        strings = [_text(found) for found in STRING.findall(arguments)]
        if name == "openat":
            path = inside(strings[0])
            if path is None:
                continue
            if "O_CREAT" in arguments and path not in existing:
                events.append(Event("create", path))
                existing.add(path)
            positions[path] = 0
            continue
        if name in ("rename", "renameat", "renameat2", "link", "linkat"):
            source, target = inside(strings[-2]), inside(strings[-1])
            assert source is not None
            assert target is not None
            kind = "rename" if name.startswith("rename") else "link"
            events.append(Event(kind, source, target))
            existing.add(target)
            if kind == "rename":
                existing.discard(source)
            continue
        if name in ("unlink", "unlinkat", "mkdir", "mkdirat"):
            path = inside(strings[-1])
            if path is not None:
                kind = "unlink" if name.startswith("unlink") else "mkdir"
                events.append(Event(kind, path))
                existing.discard(path)
            continue
        assert fd is not None, arguments[:80]
        if fd[2].endswith(DELETED):
            continue
        if name == "write" and fd[1] == "1":
            events.append(Event("said", "", data=strings[0]))
            continue
        path = inside(_text(fd[2]))
        if path is None:
            continue
        data = b"".join(strings)
        if name in ("fsync", "fdatasync"):
            events.append(Event("sync", path))
        elif name == "pwrite64":
            events.append(Event("write", path, offset=_last(arguments), data=data[:result]))
        elif name in ("write", "writev"):
            events.append(Event("write", path, offset=positions[path], data=data[:result]))
            positions[path] += result
        elif name in ("ftruncate", "fallocate"):
            events.append(Event("cut", path, offset=_last(arguments)))
        else:
            raise AssertionError(f"a call that nobody plays: {name}")
    return events


def _last(arguments: str) -> int:
    return int(arguments.rsplit(",", 1)[1])


@dataclass(slots=True)
class _File:
    """Bytes as synced, and what was done since."""

    durable: bytes = b""
    pending: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class _Folder:
    """Names as synced, and what was done since; what they name is an index into ``nodes``."""

    durable: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[str, int | None]] = field(default_factory=list)

    def now(self) -> dict[str, int]:
        return _apply(self.durable, self.pending)


def _apply(names: dict[str, int], changes: list[tuple[str, int | None]]) -> dict[str, int]:
    names = dict(names)
    for name, node in changes:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node
    return names


class Disk:
    """Plays events; ``cut_power`` writes one possible state to a real folder."""

    def __init__(self) -> None:
        self._nodes: list[_File | _Folder] = [_Folder()]

    def _find(self, path: str) -> int:
        node = 0
        for name in Path(path).parts:
            folder = self._nodes[node]
            assert isinstance(folder, _Folder)
            node = folder.now()[name]
        return node

    def _folder(self, path: str) -> _Folder:
        folder = self._nodes[self._find(str(Path(path).parent))]
        assert isinstance(folder, _Folder)
        return folder

    def _file(self, path: str) -> _File:
        file = self._nodes[self._find(path)]
        assert isinstance(file, _File)
        return file

    def play(self, event: Event) -> None:
        if event.kind in ("write", "cut"):
            self._file(event.path).pending.append(event)
        elif event.kind == "sync":
            self._sync(self._nodes[self._find(event.path)])
        elif event.kind in ("create", "mkdir"):
            self._nodes.append(_File() if event.kind == "create" else _Folder())
            self._name(event.path, len(self._nodes) - 1)
        elif event.kind == "unlink":
            self._name(event.path, None)
        elif event.kind in ("rename", "link"):
            node = self._find(event.path)
            self._name(event.target, node)
            if event.kind == "rename":
                self._name(event.path, None)

    def _name(self, path: str, node: int | None) -> None:
        self._folder(path).pending.append((Path(path).name, node))

    def _sync(self, node: _File | _Folder) -> None:
        if isinstance(node, _File):
            node.durable = _written(node.durable, node.pending)
        else:
            node.durable = node.now()
        node.pending.clear()

    def cut_power(self, to: Path, chance: random.Random) -> None:
        """Write a state to ``to``. A third of the time all that was not synced is lost, else each
        piece of it may be there."""
        keep = chance.choice((0.0, 0.5, 0.9))
        self._write_folder(0, to, chance, keep)

    def _write_folder(self, node: int, to: Path, chance: random.Random, keep: float) -> None:
        folder = self._nodes[node]
        assert isinstance(folder, _Folder)
        count = 0
        while count < len(folder.pending) and chance.random() < keep:
            count += 1
        for name, child in _apply(folder.durable, folder.pending[:count]).items():
            if name.endswith("-shm"):
                continue  # shared memory: gone with the power, or remade by the next opener
            entry = self._nodes[child]
            if isinstance(entry, _Folder):
                (to / name).mkdir(mode=0o700)
                self._write_folder(child, to / name, chance, keep)
            else:
                kept = [torn for event in entry.pending for torn in _torn(event, chance, keep)]
                (to / name).write_bytes(_written(entry.durable, kept))


def _torn(event: Event, chance: random.Random, keep: float) -> Iterator[Event]:
    """The whole event, a part of it, or nothing."""
    if chance.random() < keep:
        yield event
    elif event.kind == "write" and keep and len(event.data) > SECTORS[0]:
        sector = chance.choice(SECTORS)
        for start in range(0, len(event.data), sector):
            if chance.random() < keep:
                data = event.data[start : start + sector]
                yield Event("write", event.path, offset=event.offset + start, data=data)


def _written(content: bytes, events: list[Event]) -> bytes:
    made = bytearray(content)
    for event in events:
        end = event.offset + len(event.data)
        if len(made) < end:
            made.extend(bytes(end - len(made)))
        if event.kind == "cut":
            del made[event.offset :]
        else:
            made[event.offset : end] = event.data
    return bytes(made)
