"""The verbs of remotes. Part of Store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from kvdb.errors import UsageError

if TYPE_CHECKING:
    from kvdb.remotes.configs import RemoteSpec
    from kvdb.remotes.probe import Step
    from kvdb.remotes.remote import Remote
    from kvdb.remotes.report import PullReport, PushReport, SyncReport
    from kvdb.snapshot.selection import Selection
    from kvdb.snapshot.stream import Progress
    from kvdb.store import Store

Stopped = Callable[[], bool]


def _never() -> bool:
    return False


class Sharing:
    """What :class:`kvdb.store.Store` inherits. A remote is named by its name or its URL; its
    secrets come from the environment (``KVDB_REMOTE_<NAME>_<WHAT>``)."""

    def add_remote(
        self,
        name: str,
        url: str,
        *,
        options: Mapping[str, str] | None = None,
        reads: bool = True,
        writes: bool = True,
        budget_ms: int | None = None,
        check: bool = True,
    ) -> RemoteSpec:
        """Save a remote under a name, after it was tried unless ``check`` is False. Raises
        UsageError for a name, URL or option that is none or holds a secret, RemoteError where it
        does not work."""
        from kvdb.remotes.configs import DEFAULT_BUDGET_MS, new_spec, save_spec
        from kvdb.remotes.probe import probe
        from kvdb.remotes.remote import RemoteRefused

        store = cast("Store", self)
        budget = DEFAULT_BUDGET_MS if budget_ms is None else budget_ms
        spec = new_spec(name, url, options=options, reads=reads, writes=writes, budget_ms=budget)
        store.require_writable()
        if check:
            with _open(spec) as remote:
                for step in probe(remote, store.environment.seconds, reads=reads, writes=writes):
                    if step.problem is not None:
                        raise RemoteRefused(f"{step.name} does not work there: {step.problem}")
        return save_spec(store, spec)

    def list_remotes(self) -> list[RemoteSpec]:
        """All remotes, by name."""
        from kvdb.remotes.configs import load_specs

        with cast("Store", self).database.read() as connection:
            return load_specs(connection)

    def find_remote(self, name: str) -> RemoteSpec:
        """The remote of a name or URL. Raises StoreMissing, UsageError."""
        from kvdb.remotes.configs import named_or_at

        with cast("Store", self).database.read() as connection:
            return named_or_at(connection, name)

    def check_remote(self, name: str) -> list[Step]:
        """Try what a remote (a name or a URL) is for. Raises RemoteError where it cannot even be
        opened."""
        from kvdb.remotes.probe import probe

        spec = self.find_remote(name)
        seconds = cast("Store", self).environment.seconds
        with _open(spec) as remote:
            return list(probe(remote, seconds, reads=spec.reads, writes=spec.writes))

    def remove_remote(self, name: str) -> None:
        """Forget a remote; what it holds stays there. Raises StoreMissing."""
        from kvdb.remotes.configs import remove_spec

        remove_spec(cast("Store", self), name)

    def push(
        self,
        remote: str,
        *,
        sequences: Sequence[str] = (),
        where: str | None = None,
        model: str | None = None,
        max_bytes: int | None = None,
        verify: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
        stopped: Stopped = _never,
    ) -> PushReport:
        """Put what is stored here and the remote lacks; chosen as in
        :meth:`export_snapshot <kvdb.store.Store.export_snapshot>`. With ``verify`` what is there
        is fetched and checked, and bad objects are replaced. ``progress`` is told (blocks done,
        blocks in all); when ``stopped`` gives True it ends, and goes on when it is asked for again.

        Blocks of namespaces with a salt stay here unless the remote's option ``salted`` is true.
        Where the remote fails after the first objects, the report says why it stopped. Raises
        RemoteError where nothing could be done, UsageError for a remote that is not written."""
        spec = self.find_remote(remote)
        if not spec.writes:
            raise UsageError(f"The remote {spec.name!r} is not to be written (--no-write).")
        with _open(spec) as opened:
            return _push(
                cast("Store", self),
                spec,
                opened,
                _selection(spec, sequences, where, model, max_bytes),
                verify=verify,
                dry_run=dry_run,
                progress=progress,
                stopped=stopped,
            )

    def pull(
        self,
        remote: str,
        *,
        model: str | None = None,
        evict: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
        stopped: Stopped = _never,
    ) -> PullReport:
        """Take what the remote has and the store lacks, of all models or of one (a name, or the
        start of a namespace's fingerprint), every object checked. What is stored stays, unless
        ``evict``. ``progress`` is told (objects dealt with, objects in all); it can be ``stopped``
        as :meth:`push`.

        Raises RemoteError where nothing could be done, UsageError for a remote that is not read,
        StoreMissing where it has nothing of the model."""
        spec = self.find_remote(remote)
        if not spec.reads:
            raise UsageError(f"The remote {spec.name!r} is not to be read (--no-read).")
        with _open(spec) as opened:
            return _pull(
                cast("Store", self),
                spec,
                opened,
                model=model,
                evict=evict,
                dry_run=dry_run,
                progress=progress,
                stopped=stopped,
            )

    def sync(
        self,
        remote: str,
        *,
        evict: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
        stopped: Stopped = _never,
    ) -> SyncReport:
        """Push, then pull, as far as the remote is written and read."""
        from kvdb.remotes.report import INTERRUPTED, SyncReport

        store = cast("Store", self)
        spec = self.find_remote(remote)
        report = SyncReport(None, None)
        how: dict[str, Any] = {"dry_run": dry_run, "progress": progress, "stopped": stopped}
        with _open(spec) as opened:
            if spec.writes:
                chosen = _selection(spec, (), None, None, None)
                report.push = _push(store, spec, opened, chosen, **how)
            interrupted = report.push is not None and report.push.stopped == INTERRUPTED
            if spec.reads and not interrupted:
                report.pull = _pull(store, spec, opened, evict=evict, **how)
        return report


def _selection(
    spec: RemoteSpec,
    sequences: Sequence[str],
    where: str | None,
    model: str | None,
    max_bytes: int | None,
) -> Selection:
    from kvdb.snapshot.selection import Selection

    if max_bytes is not None and max_bytes < 0:
        raise UsageError("max_bytes must not be negative.")
    return Selection(
        tuple(sequences),
        where,
        model=model,
        max_bytes=max_bytes,
        salted=spec.config.salted,
    )


@contextlib.contextmanager
def _open(spec: RemoteSpec) -> Iterator[Remote]:
    from kvdb.remotes.registry import open_remote

    with contextlib.closing(open_remote(spec.config)) as remote:
        yield remote


def _push(
    store: Store, spec: RemoteSpec, remote: Remote, selection: Selection, **how: Any
) -> PushReport:
    from kvdb.remotes.configs import count_transfer
    from kvdb.remotes.push import push_blocks

    with _noted(store, spec):
        report = push_blocks(store, remote, selection, **how)
    if not how["dry_run"]:
        count_transfer(
            store,
            spec,
            put=(report.stored, report.nbytes),
            present=report.present,
            rejected=report.rejected,
            failed=report.failed,
            error=report.stopped if report.broken else "",
        )
    return report


def _pull(store: Store, spec: RemoteSpec, remote: Remote, **how: Any) -> PullReport:
    from kvdb.remotes.configs import count_transfer
    from kvdb.remotes.pull import pull_blocks

    with _noted(store, spec):
        report = pull_blocks(store, remote, salted=spec.config.salted, **how)
    if not how["dry_run"]:
        count_transfer(
            store,
            spec,
            got=(report.got, report.nbytes),
            rejected=report.rejected,
            error=report.stopped if report.broken else "",
        )
    return report


@contextlib.contextmanager
def _noted(store: Store, spec: RemoteSpec) -> Iterator[None]:
    """What a remote raises is kept in its row, too."""
    from kvdb.remotes.configs import count_transfer
    from kvdb.remotes.remote import RemoteError

    try:
        yield
    except RemoteError as error:
        if not store.read_only:
            count_transfer(store, spec, failed=1, error=str(error))
        raise
