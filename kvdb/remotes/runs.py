"""Runs: what is pulled goes into the store in pieces that become visible one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdb.driver import Connection
from kvdb.remotes.report import PullReport
from kvdb.snapshot.admission import Admission, Admitted
from kvdb.snapshot.staging import NoRoom, Staging

if TYPE_CHECKING:
    from kvdb.store import Store

# A run is published when it is so large, or so old.
RUN_BYTES = 96 << 20
RUN_SECONDS = 5.0


class Runs:
    """See the module; NoRoom is raised where the store takes no more."""

    def __init__(
        self, store: Store, admission: Admission, report: PullReport, *, evict: bool
    ) -> None:
        self._staging = Staging(store, evict=evict)
        self._seconds = store.environment.seconds
        self._admission = admission
        self._report = report
        self._added = 0
        self._nbytes = 0
        self._due = self._seconds() + RUN_SECONDS

    def add(self, admitted: Admitted) -> None:
        """Take a block, in memory of its own. Raises NoRoom."""
        if admitted.stands_on_stored:
            self._staging.anchors.add(admitted.member.parent)
        self._added += 1
        self._nbytes += admitted.member.payload_bytes
        self._staging.take(admitted.member)
        if self._nbytes >= RUN_BYTES or self._seconds() >= self._due:
            self.publish()

    def publish(self) -> None:
        """Make visible what was added. Raises NoRoom when not all of it fits; the rest is staged
        then, for :meth:`publish_staged`."""
        self._staging.finish()
        self._publish()
        self._added = 0

    def publish_staged(self) -> None:
        """Make visible what fits; the rest of the run is left."""
        try:
            self._staging.finish()
        except NoRoom:
            self._staging.finish()
        self._publish()
        if self._added > 0:
            self._report.left["no_room"] += self._added
        self._added = 0

    def close(self) -> None:
        """Remove what was not published."""
        self._staging.close()

    def _publish(self) -> None:
        self._staging.publish({}, _nothing, self._count)
        self._admission.forget()
        self._nbytes = 0
        self._due = self._seconds() + RUN_SECONDS

    def _count(self, stored: int, present: int, dropped: int) -> None:
        self._report.stored += stored
        self._report.new -= present  # somebody else stored them meanwhile
        self._report.present += present
        if dropped:
            self._report.left["parent_missing"] += dropped
        self._added -= stored + present + dropped


def _nothing(_: Connection) -> None:
    pass
