"""Export: chosen blocks as one stream of canonical bytes, while others write and evict.

The chains are held from the choice to the end. A block that goes all the same (damage, eviction
before it was held) is left out with its descendants.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from kvdb.codecs import get_codec
from kvdb.durable import FileSystem, write_all
from kvdb.errors import (
    IntegrityError,
    KvdbError,
    OutOfSpace,
    StoreLocked,
    StoreMissing,
    StoreReadOnly,
    StoreUnavailable,
    UsageError,
)
from kvdb.members import parse_member, read_member
from kvdb.shards import HEADER_CAP_BYTES
from kvdb.snapshot.arenas import Arenas
from kvdb.snapshot.manifest import MAX_BYTES as MANIFEST_BYTES
from kvdb.snapshot.provenance import insert_export
from kvdb.snapshot.selection import Chosen, Plan, Selection, make_plan
from kvdb.snapshot.stream import (
    END,
    MANIFEST,
    SUMS,
    Digests,
    Progress,
    TarReader,
    block_name,
    entry,
    sha256,
)

if TYPE_CHECKING:
    from kvdb.encryption import Writable
    from kvdb.sequences import Sequence as HeldSequence
    from kvdb.store import Store

SUMS_IN_MEMORY = 4 << 20
SYNC_BYTES = 32 << 20
PARTIAL = ".partial"

# A whole member, header and padding included.
Buffers = list[memoryview]
# The store cannot be written now: no reason not to export it.
UNWRITABLE = (StoreLocked, OutOfSpace, StoreUnavailable, StoreReadOnly)


@dataclass(slots=True)
class ExportReport:
    """What was written: blocks, those left out because they went meanwhile, the sequences that
    come along, bytes in all, and how many blocks an earlier run had written already. ``digest`` is
    the SHA-256 (hex) of the list of digests, and so of the content."""

    blocks: int = 0
    skipped: int = 0
    sequences: int = 0
    nbytes: int = 0
    resumed: int = 0
    digest: str = ""


def export_snapshot(
    store: Store,
    target: Path | Writable,
    selection: Selection,
    *,
    codec: str | None = None,
    tokens: bool = True,
    seal: Callable[[Iterator[memoryview], Writable], None] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """See :meth:`kvdb.store.Store.export_snapshot`; ``seal`` encrypts what it is given."""
    if codec is not None and not get_codec(codec).lossless:
        raise UsageError(f"The codec {codec!r} loses bits; a snapshot keeps them.")
    plan = make_plan(store, selection, tokens=tokens, recoded=codec)
    if dry_run:
        manifest = plan.manifest
        return ExportReport(
            len(plan.blocks), sequences=len(manifest.sequences), nbytes=manifest.raw_bytes
        )
    run = _Export(store, plan, codec, tokens, progress)
    started = store.environment.now_us()
    with contextlib.closing(run), held(store, plan):
        if not isinstance(target, Path):
            _pour(run.buffers(), target, seal)
        else:
            _to_file(store.fs, run, target, seal)
    name = target.name if isinstance(target, Path) else "stream"
    ended, report = store.environment.now_us(), run.report
    with contextlib.suppress(*UNWRITABLE), store.database.write() as connection:
        insert_export(connection, name, report.digest, report.blocks, report.nbytes, started, ended)
    return run.report


class _Export:
    """One export: an iterator of entries, and what it came to."""

    def __init__(
        self,
        store: Store,
        plan: Plan,
        codec: str | None,
        tokens: bool,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self.plan = plan
        self.manifest = plan.manifest.encode()
        self._codec = None if codec is None else get_codec(codec)
        self._tokens = tokens
        self._progress = progress
        self._sums: IO[bytes] = tempfile.SpooledTemporaryFile(SUMS_IN_MEMORY)  # noqa: SIM115 - closed by close
        self._digests = Digests(self._sums.write)
        self._done = 0
        # A block is read into one while the one before is hashed and written out of the other.
        self._arenas = Arenas()
        self.report = ExportReport(sequences=len(plan.manifest.sequences))

    def start(self) -> Buffers:
        """The manifest."""
        return self._entry(MANIFEST, [memoryview(self.manifest)])

    def blocks(self) -> Iterator[Buffers]:
        """The blocks that are still to be written."""
        gone: set[int] = set()
        for block in self.plan.blocks[self._done :]:
            if self._progress is not None:
                self._progress(self._done, len(self.plan.blocks))
            self._done += 1
            # With its parent gone before it was held, a block is of no use.
            made = None if block.parent_id in gone else self._block(block)
            if made is None:
                gone.add(block.id)
                self.report.skipped += 1
            else:
                self.report.blocks += 1
                yield made
        if self._progress is not None:
            self._progress(self._done, len(self.plan.blocks))

    def end(self) -> Buffers:
        """The list of digests, and the end of the stream."""
        self._digests.wait()
        self._sums.seek(0)
        sums = self._sums.read()
        self.report.digest = hashlib.sha256(sums).hexdigest()
        made = [*entry(SUMS, [memoryview(sums)]), memoryview(END)]
        self.report.nbytes += sum(buffer.nbytes for buffer in made)
        return made

    def buffers(self) -> Iterator[memoryview]:
        """The whole stream."""
        yield from self.start()
        for made in self.blocks():
            yield from made
        yield from self.end()

    def resumed(self, name: str, digest: bytes, nbytes: int) -> None:
        """Count a member that an earlier run wrote."""
        self._digests.known(name, digest)
        self.report.nbytes += nbytes
        if name != MANIFEST:
            self._done += 1
            self.report.blocks += 1
            self.report.resumed += 1

    def _block(self, block: Chosen) -> Buffers | None:
        record = self.plan.manifest.namespaces[block.namespace]
        self._arenas.swap()
        member = read_member(self._store, record, block.id, self._arenas.take)
        if member is None or member.hash != block.hash:
            self._arenas.swap()  # the one before may still be hashed and written out of the other
            return None
        if self._codec is not None:
            member = member.recoded(self._codec)
        if not self._tokens:
            member = member.without_tokens()
        return self._entry(block_name(block.namespace, block.hash), member.encode())

    def close(self) -> None:
        self._digests.close()
        self._sums.close()

    def _entry(self, name: str, buffers: Sequence[memoryview]) -> Buffers:
        self._digests.add(name, buffers)
        made = entry(name, buffers)
        self.report.nbytes += sum(buffer.nbytes for buffer in made)
        return made


@contextmanager
def held(store: Store, plan: Plan) -> Iterator[None]:
    """Hold every chain, so that none is evicted while it is written. Where the store cannot be
    written nothing is held, and what others evict meanwhile is left out."""
    holds: list[HeldSequence] = []
    spaces = {space.fingerprint: space for space in store.namespaces()}
    try:
        with contextlib.suppress(*UNWRITABLE):
            for leaf in plan.leaves:
                fingerprint = plan.manifest.namespaces[leaf.namespace].fingerprint
                # One that went already is not held: what is left of its chain may go too.
                with contextlib.suppress(StoreMissing):
                    holds.append(store.sequence(spaces[fingerprint], leaf.hash))
        yield
    finally:
        for hold in holds:
            hold.drop()


def _pour(
    buffers: Iterator[memoryview],
    target: Writable,
    seal: Callable[[Iterator[memoryview], Writable], None] | None,
) -> None:
    if seal is not None:
        seal(buffers, target)
        return
    for buffer in buffers:
        view = buffer.cast("B")
        while view:
            view = view[target.write(view) or 0 :]


def _to_file(
    fs: FileSystem,
    run: _Export,
    target: Path,
    seal: Callable[[Iterator[memoryview], Writable], None] | None,
) -> None:
    """Write to ``target.partial``, go on with one that is there, and give it its name when it is
    whole and durable."""
    _refuse_existing(target)
    partial = target.with_name(target.name + PARTIAL)
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"Another export is writing {partial}.") from error
        _refuse_existing(target)  # another export may have been done since
        if seal is not None:
            file.truncate(0)
            seal(run.buffers(), file)
        else:
            _resume(run, file)
            with _Output(fs, file.fileno()) as output:
                if not run.report.nbytes:
                    output.write(run.start())
                for made in run.blocks():
                    output.write(made)
                output.write(run.end())
        fs.sync(file.fileno())
    fs.rename(partial, target)
    fs.sync_directory(target.parent)


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise UsageError(f"{target} is there already; remove it, or choose another name.")


class _Output:
    """Writes one entry while the next is made, and syncs as it goes, so that little is left to
    sync at the end."""

    def __init__(self, fs: FileSystem, fd: int) -> None:
        self._fs = fs
        self._fd = fd
        self._unsynced = 0
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "kvdb-export")
        self._writing: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait()
        finally:
            self._executor.shutdown()

    def write(self, made: Buffers) -> None:
        """Raises OSError for what was given before."""
        self._wait()
        self._writing = self._executor.submit(self._write, made)

    def _write(self, made: Buffers) -> None:
        self._unsynced += write_all(self._fs, self._fd, made)
        if self._unsynced >= SYNC_BYTES:
            self._fs.sync(self._fd)
            self._unsynced = 0

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def _resume(run: _Export, file: IO[bytes]) -> None:
    """Keep the members at the file's start that this export would write too; cut the rest."""
    end = 0
    reader = TarReader(file)  # type: ignore[arg-type]
    try:
        first = reader.next()
        if first is not None and first.name == MANIFEST:
            data = reader.read(first, MANIFEST_BYTES)
            if data == run.manifest:
                run.resumed(MANIFEST, sha256([data]), reader.position)
                end = reader.position
                for block in run.plan.blocks:
                    digest = _same_block(run, reader, block)
                    run.resumed(
                        block_name(block.namespace, block.hash), digest, reader.position - end
                    )
                    end = reader.position
    except KvdbError:
        pass  # from here on it is written anew
    file.seek(end)
    file.truncate(end)


def _same_block(run: _Export, reader: TarReader, block: Chosen) -> bytes:
    """The digest of a member that is this block. Raises IntegrityError for anything else."""
    member = reader.next()
    if member is None or member.name != block_name(block.namespace, block.hash):
        raise IntegrityError("The partial file goes another way.")
    record = run.plan.manifest.namespaces[block.namespace]
    limit = sum(part.nbytes(record.block_tokens) for part in record.layout.parts)
    data = reader.read(member, limit + 2 * HEADER_CAP_BYTES)
    if parse_member(data, record).hash != block.hash:
        raise IntegrityError("The partial file holds another block.")
    return sha256([data])
