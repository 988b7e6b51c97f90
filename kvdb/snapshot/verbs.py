"""The verbs of snapshots. Part of Store."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from kvdb.errors import UsageError

if TYPE_CHECKING:
    from kvdb.encryption import Keys, Lock, Writable
    from kvdb.snapshot.export import ExportReport
    from kvdb.snapshot.importing import ImportReport, Terms
    from kvdb.snapshot.stream import Progress, Readable
    from kvdb.store import Store


class Snapshots:
    """What :class:`kvdb.store.Store` inherits."""

    def export_snapshot(
        self,
        target: str | os.PathLike[str] | Writable,
        *,
        sequences: Sequence[str] = (),
        where: str | None = None,
        ids: Set[int] | None = None,
        model: str | None = None,
        since: str | None = None,
        codec: str | None = None,
        max_bytes: int | None = None,
        tokens: bool = True,
        lock: Lock | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ExportReport:
        """Write live blocks, with all that they stand on, as one stream: to a file (which gets its
        name when it is whole; an interrupted run goes on when it is asked for again), or to an
        object with ``write``.

        ``sequences``, ``where`` (a condition on block_usage), ``ids`` (of blocks), ``model`` (a
        name, or the start of a namespace's fingerprint), ``since`` (a snapshot file, an export's
        digest, or a time) and ``max_bytes`` (the hottest blocks) choose among them. ``codec``
        encodes parts anew; without ``tokens`` a snapshot says nothing of the prompts. ``lock``
        encrypts it.

        Others may write and evict meanwhile. Raises UsageError, StoreMissing, QueryError."""
        from kvdb.snapshot.export import export_snapshot
        from kvdb.snapshot.selection import Selection
        from kvdb.snapshot.since import Since, resolve

        store = cast("Store", self)
        if max_bytes is not None and max_bytes < 0:
            raise UsageError("max_bytes must not be negative.")
        given = Since(None, None) if since is None else resolve(store, since)
        selection = Selection(
            tuple(sequences), where, ids, model, given.time_us, given.base, max_bytes
        )
        return export_snapshot(
            store,
            _path(target),
            selection,
            codec=codec,
            tokens=tokens,
            seal=None if lock is None else lock.seal,
            dry_run=dry_run,
            progress=progress,
        )

    def import_snapshot(
        self,
        source: str | os.PathLike[str] | Readable,
        *,
        keys: Keys | None = None,
        name: str | None = None,
        dry_run: bool = False,
        trust: bool = False,
        terms: Terms | None = None,
        progress: Progress | None = None,
    ) -> ImportReport:
        """Take what a snapshot holds and the store lacks. Every byte is checked before anything
        becomes visible; a snapshot that fails leaves the store as it was.

        ``source`` is a file, or an object with ``readinto`` (read once, to its end). ``keys`` open
        an encrypted one. ``trust`` takes one without tokens, in which nothing proves what the
        state belongs to. ``terms`` bound what is taken, and say what it is called. ``dry_run``
        checks and counts only. ``name`` is kept as where the blocks came from (default: the
        file's name).

        Raises SnapshotRejected in one sentence for anything that an export does not write,
        OutOfSpace where it does not fit, UsageError where ``source`` is no file."""
        from kvdb.snapshot.importing import import_snapshot

        path = _path(source)
        return import_snapshot(
            cast("Store", self),
            lambda: _open(path, keys),
            name=name or (path.name if isinstance(path, Path) else "stream"),
            again=isinstance(path, Path),
            dry_run=dry_run,
            trust=trust,
            terms=terms,
            total_bytes=path.stat().st_size if isinstance(path, Path) and path.exists() else 0,
            progress=progress,
        )


def _path(given: Any) -> Any:
    return Path(given) if isinstance(given, str | os.PathLike) else given


@contextmanager
def _open(source: Path | Readable, keys: Keys | None) -> Iterator[Readable]:
    from kvdb.encryption import Keys, plain

    keys = keys or Keys()
    if not isinstance(source, Path):
        with plain(source, keys) as readable:
            yield readable
        return
    with _open_file(source) as file, plain(cast("Readable", file), keys) as readable:
        yield readable


def _open_file(path: Path) -> IO[bytes]:
    """A regular file under its own name: what a link leads to may change, a pipe may block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(f"{path} is a symbolic link; name the file itself.") from error
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{path} is not a file; - reads from a pipe.")
    return os.fdopen(descriptor, "rb", buffering=0)
