"""What push, pull and sync share: progress, ^C, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import click

from kvdb.cli.interrupts import noted_interrupts
from kvdb.cli.output import human_bytes, say
from kvdb.cli.progress import Report, progress

if TYPE_CHECKING:
    from kvdb.remotes.report import PullReport, PushReport

PROBLEMS_FOUND = 3
LEFT = {
    "parent_missing": "blocks stand on others that are neither here nor good there",
    "too_large": "blocks are larger than this store keeps (max_bytes / 4)",
    "no_room": "blocks found no room here",
    "incomplete": "blocks are there in part only",
    "undescribed": "namespaces have no description there",
    "went": "objects went meanwhile",
}

remote_argument = click.argument("remote", metavar="NAME|URL")


class Transferring(NamedTuple):
    """What a transfer reports to, and what stops it."""

    progress: Report
    stopped: Callable[[], bool]


@contextmanager
def transferring(label: str) -> Iterator[Transferring]:
    """^C ends a transfer after what it is at; a second one at once."""
    seen: list[int] = []

    def again() -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(1)

    with progress(label) as report, noted_interrupts(again) as interrupted:
        yield Transferring(report, interrupted)


def say_pushed(done: PushReport, dry_run: bool) -> None:
    verb = "would go" if dry_run else "went"
    say(
        f"{done.blocks} blocks: {done.stored} objects {verb} there ({human_bytes(done.nbytes)}), "
        f"{done.present} were there."
    )
    if done.replaced:
        say(f"{done.replaced} of them took the place of bad ones.")
    if done.went or done.withheld:
        say(f"{done.went} blocks went meanwhile, {done.withheld} have no tokens to check them by.")
    _say_common(done)


def say_pulled(done: PullReport, dry_run: bool) -> None:
    stored, came = ("would be stored", "would come") if dry_run else ("stored", "came")
    say(
        f"{done.blocks} blocks there: {done.stored} {stored}, {done.present} were here; "
        f"{human_bytes(done.nbytes)} {came}."
    )
    for reason, count in done.left.items():
        say(f"Left out: {count} {LEFT[reason]}.")
    _say_common(done)


def _say_common(done: PushReport | PullReport) -> None:
    if done.rejected:
        key, why = next(iter(done.named.items()))
        say(
            f"{done.rejected} objects there are not what their names say; the first is {key}: "
            f"{why.rstrip('.')}."
        )
    if done.salted:
        say(
            f"{done.salted} namespaces of tenants of their own were left out "
            "(the remote's option salted=true shares them)."
        )


def conclude(*reports: PushReport | PullReport | None) -> None:
    """End the verb as its reports say: 130 when it was interrupted, 1 when it stopped early, 3 when
    there was something to have and nothing of it could be had."""
    from kvdb.remotes.remote import RemoteError
    from kvdb.remotes.report import INTERRUPTED, PullReport

    reasons = [report.stopped for report in reports if report is not None and report.stopped]
    if INTERRUPTED in reasons:
        raise KeyboardInterrupt
    if reasons:
        raise RemoteError(reasons[0])
    if any(isinstance(report, PullReport) and report.came_to_nothing for report in reports):
        say("Nothing of what is there could be taken.")
        click.get_current_context().exit(PROBLEMS_FOUND)
