"""A probe: does a remote do what it must, and how long does it take?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvdb.remotes.naming import ROOT
from kvdb.remotes.remote import Get, Put, Remote, RemoteError

# One small object, the same from every machine.
PROBE_KEY = f"{ROOT}check/kvdb.json"
PROBE = b'{"kind":"kvdb probe","format":1}\n'
MOST_LISTED = 10_000


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was tried, how long it took, and why it did not work."""

    name: str
    ms: float
    problem: str | None


def probe(
    remote: Remote, seconds: Callable[[], float], *, reads: bool = True, writes: bool = True
) -> Iterator[Step]:
    """Try what the remote is for; one step after another, also when one fails."""
    tried: list[tuple[str, Callable[[], str | None]]] = [("exists", lambda: _exists(remote))]
    if writes:
        tried.append(("put", lambda: _put(remote)))
    if reads:
        tried.append(("get", lambda: _get(remote, written=writes)))
        tried.append(("list", lambda: _list(remote, written=writes)))
    for name, attempt in tried:
        began = seconds()
        try:
            problem = attempt()
        except RemoteError as error:
            problem = str(error)
        yield Step(name, 1000 * (seconds() - began), problem)


def _exists(remote: Remote) -> None:
    remote.exists_many([PROBE_KEY])


def _put(remote: Remote) -> str | None:
    # Replaced, so that it is written even where it is: an older one may be of another key.
    (state,) = remote.put_many([Put(PROBE_KEY, [memoryview(PROBE)], True)])
    return None if state == "stored" else f"Nothing could be stored ({state})."


def _get(remote: Remote, *, written: bool) -> str | None:
    buffer = bytearray(4096)
    (got,) = remote.get_many([Get(PROBE_KEY, memoryview(buffer))])
    if got.nbytes is None:
        if got.problem is None and not written:
            return None  # nobody has probed it yet: that it answers is all there is to see
        return f"The probe did not come back ({got.problem or 'it is not there'})."
    return None if buffer[: got.nbytes] == PROBE else "The probe came back changed."


def _list(remote: Remote, *, written: bool) -> str | None:
    for number, listed in enumerate(remote.list(ROOT)):
        if listed.key == PROBE_KEY or number > MOST_LISTED:
            return None
    return "The probe is not listed." if written else None
