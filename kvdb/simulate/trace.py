"""Block traces: requests as chains of blocks, read from Mooncake's JSON lines."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from kvdb.errors import UsageError

GZIP_MAGIC = b"\x1f\x8b"
MAX_LINE_BYTES = 16 << 20  # a gzip file of one endless line must not fill the memory
MAX_MS = 1e14  # with it every sum of times is finite, and exact to a tenth of a second
MAX_TOKENS = 1 << 40


class Request(NamedTuple):
    """A chain of block numbers, root first, of which the first ``counted`` are looked up and the
    rest only stored."""

    chain: tuple[int, ...]
    counted: int


class Timing(NamedTuple):
    """When a request came, and how many tokens its prompt has."""

    at_seconds: float
    tokens: int


class Trace:
    """Requests over blocks numbered from 0, with each block's parent (-1 at a root) and depth.

    A block is its key *and* all keys before it, so one key after two different prefixes makes two
    blocks, as it does in a store.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.timings: list[Timing] = []  # of all requests, or of none
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def add(
        self, keys: Sequence[int], counted: int | None = None, timing: Timing | None = None
    ) -> None:
        chain = []
        parent = -1
        for depth, key in enumerate(keys):
            number = self._numbers.setdefault((parent, key), len(self.parents))
            if number == len(self.parents):
                self.parents.append(parent)
                self.depths.append(depth)
            chain.append(number)
            parent = number
        self.requests.append(Request(tuple(chain), len(chain) if counted is None else counted))
        if timing is not None:
            self.timings.append(timing)

    @property
    def blocks(self) -> int:
        """How many different blocks there are."""
        return len(self.parents)

    @property
    def is_timed(self) -> bool:
        return len(self.timings) == len(self.requests)

    @property
    def references(self) -> int:
        """How many look-ups of a block there are: what hit ratios are shares of."""
        return sum(request.counted for request in self.requests)


def read_trace(path: Path) -> Trace:
    """A trace file, plain or gzip. Raises UsageError that names the line it cannot use."""
    trace = Trace()
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                if len(line) == MAX_LINE_BYTES:
                    raise UsageError(f"{path}, line {number}: longer than any trace's.")
                if line.strip():
                    hash_ids, timing = _request(path, number, line)
                    trace.add(hash_ids, timing=timing)
    except FileNotFoundError:
        raise UsageError(f"There is no trace at {path}.") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise UsageError(f"{path} is damaged gzip after line {number}.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None
    if trace.references == 0:
        raise UsageError(f"{path} holds no requests.")
    return trace


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
    return cast("BinaryIO", gzip.open(path, "rb")) if packed else path.open("rb")


def _request(path: Path, number: int, line: bytes) -> tuple[list[int], Timing | None]:
    def wrong(what: str) -> UsageError:
        return UsageError(f"{path}, line {number}: {what}.")

    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        raise wrong("not JSON") from None
    if not isinstance(document, dict) or "hash_ids" not in document:
        raise wrong("not an object with hash_ids")
    hash_ids = document["hash_ids"]
    if not isinstance(hash_ids, list) or not all(type(id_) is int for id_ in hash_ids):
        raise wrong("hash_ids is not a list of integers")
    return hash_ids, _timing(document, wrong)


def _timing(document: dict[str, Any], wrong: Callable[[str], UsageError]) -> Timing | None:
    """None where a trace does not say it."""
    at_ms, tokens = document.get("timestamp"), document.get("input_length")
    if at_ms is None or tokens is None:
        return None
    if type(at_ms) not in (int, float) or not 0 <= at_ms < MAX_MS:
        raise wrong("timestamp is no time in milliseconds")
    if type(tokens) is not int or not 0 <= tokens < MAX_TOKENS:
        raise wrong("input_length is no number of tokens")
    return Timing(at_ms / 1000, tokens)
