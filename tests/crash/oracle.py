"""What must hold after any crash: who was acknowledged reads back, nothing lies, nothing stays."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import kvdb
from kvdb.layout import Layout
from kvdb.match import Namespace
from kvdb.store import Store
from tests.crash.progress import Totals
from tests.support import MIXED, PLAIN, check_prefix, open_namespace, random_tokens

LAYOUTS: dict[str, Layout] = {"plain": PLAIN, "mixed": MIXED}
KNOWN_FILES = {
    *("index.sqlite", "index.backup", "index", "ballast", "store.lock", "writer.lock"),
    *("shards", "tmp", "processes"),
}
Ack = tuple[str, int, int]  # layout, prompt (seed of its tokens), token count


@dataclass(slots=True)
class Ledger:
    """What worker processes said: acknowledged chains, names given, whether eviction began."""

    acks: set[Ack] = field(default_factory=set)
    names: dict[str, Ack] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    evicting: bool = False
    swept: int = 0

    def hear(self, lines: Iterable[str]) -> int:
        """Take in a worker's lines; returns how many acknowledgements there were."""
        count = 0
        for line in lines:
            word, *rest = line.split()
            if word == "ack":
                self.acks.add((rest[0], int(rest[1]), int(rest[2])))
                count += 1
            elif word == "name":
                self.names[rest[0]] = (rest[1], int(rest[2]), int(rest[3]))
                self.doubtful.discard(rest[0])
            elif word == "naming":
                self.doubtful.add(rest[0])
            elif word == "evicting":
                self.evicting = True
        return count


def namespaces(store: Store) -> dict[str, Namespace]:
    return {name: open_namespace(store, layout) for name, layout in LAYOUTS.items()}


def read_back(store: Store, ledger: Ledger, totals: Totals, must: set[Ack] | None = None) -> None:
    """Look up every acknowledged chain. What an eviction row names is forgotten; what is missing
    otherwise is lost, unless ``must`` is given and does not hold it."""
    known = namespaces(store)
    rows = store.sql("SELECT block_hash FROM evictions WHERE reason = 'manual'", limit=1 << 30).rows
    evicted = {bytes.fromhex(h) if isinstance(h, str) else bytes(h) for (h,) in rows}
    for ack in sorted(ledger.acks):
        layout, prompt, count = ack
        namespace = known[layout]
        tokens = random_tokens(prompt, count)
        totals.looked_up += 1
        try:
            usable = check_prefix(store, namespace, tokens)
        except AssertionError:
            totals.wrong += 1
            continue
        if usable == count:
            continue
        if ledger.evicting and store.match(namespace, tokens).hashes[-1] in evicted:
            ledger.acks.discard(ack)
        elif must is None or ack in must:
            totals.lost += 1


def check_names(store: Store, ledger: Ledger) -> None:
    """Named sequences stay, with their chain; running requests of the dead are gone."""
    rows = store.sql("SELECT name FROM sequences WHERE name IS NOT NULL", limit=1 << 20).rows
    stored = {name for (name,) in rows}
    for name in set(ledger.names) - stored:
        assert name in ledger.doubtful, f"the name {name} is lost"
        del ledger.names[name]
    assert stored - set(ledger.names) <= ledger.doubtful, "a name that nobody gave"
    unnamed = store.sql("SELECT count(*) FROM sequences WHERE name IS NULL").rows
    assert unnamed == [(0,)]


def check_store(
    path: Path, ledger: Ledger, *, must: set[Ack] | None = None, repair: bool = False
) -> Totals:
    """Open the store, which nobody else uses, and hold it against the ledger."""
    totals = Totals()
    with kvdb.open(path) as store:
        read_back(store, ledger, totals, must)
        if must is None:
            check_names(store, ledger)
        if repair:
            store.verify(data=True, repair=True)
        report = store.verify(data=True)
        assert report.problems == [], report.problems
        reasons = store.sql("SELECT DISTINCT reason FROM evictions").rows
        assert repair or {reason for (reason,) in reasons} <= {"manual"}, reasons
        info = store.info()
        assert (info.leftovers, info.processes) == (0, 1)
        swept = info.counters["leftovers_swept"]
        totals.swept += max(0, swept - ledger.swept)
        ledger.swept = swept
        left_over = _age_strays(store)
        if left_over:
            report = store.verify(repair=True)
            assert {problem.kind for problem in report.problems} == {"orphan"}, report.problems
            assert report.swept_files == left_over
            assert strays(store) == []
            totals.left_over += left_over
            totals.swept += left_over
    left = {entry.name.partition(".set-aside")[0] for entry in path.iterdir()}
    assert left <= KNOWN_FILES, left - KNOWN_FILES
    return totals


def strays(store: Store) -> list[Path]:
    """Files in the store's folders that no row names."""
    known = {uuid for (uuid,) in store.sql("SELECT uuid FROM shards", limit=1 << 30).rows}
    known |= {uuid for (uuid,) in store.sql("SELECT uuid FROM processes", limit=1 << 30).rows}
    patterns = ("tmp/*", "shards/??/*", "processes/*", "index.backup.new*", "index.rebuilding*")
    files = [file for pattern in patterns for file in store.path.glob(pattern)]
    return [file for file in files if file.name.split(".")[0] not in known]


def _age_strays(store: Store) -> int:
    """Make strays older than verify's grace period; returns their number."""
    found = strays(store)
    for file in found:
        with contextlib.suppress(FileNotFoundError):
            os.utime(file, (1, 1))
    return len(found)
