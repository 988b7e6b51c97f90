"""Bit rot over shards, index and WAL: a miss, never a lie; all of it is found; repair ends."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import kvdb
from kvdb.errors import IntegrityError
from kvdb.store import Store
from tests.crash.oracle import Ack, Ledger, namespaces, read_back
from tests.crash.progress import Run, Totals, torture_folder
from tests.crash.scenes import make_plain, make_unclean
from tests.crash.worker import outcome
from tests.crash.zygote import Zygote
from tests.support import random_tokens, shard_files

SHORT, LONG = 300, 5000
# What an index that was hurt may say; StoreMissing is what an emptied one looks like.
SAID = {
    *("IntegrityError", "NotAStore", "StoreUnavailable", "StoreMissing", "StoreTooNew"),
    "QueryError",  # of the questions that these tests ask in SQL
}
DAMAGED = "SELECT count(*) FROM evictions WHERE reason IN ('damaged', 'missing')"


def flip(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def truncate(file: Path, chance: random.Random) -> None:
    data = file.read_bytes()
    to = chance.choice((0, 1, len(data) // 2, len(data) - 1, chance.randrange(len(data))))
    file.write_bytes(data[:to])


def extend(file: Path, chance: random.Random) -> None:
    file.write_bytes(file.read_bytes() + chance.randbytes(chance.randrange(1, 5000)))


def swap(file: Path, chance: random.Random) -> None:
    """With another shard; an index or WAL has no other, and loses a page to another place."""
    if file.suffix == ".safetensors":
        others = [other for other in shard_files(file.parents[2]) if other != file]
        other = chance.choice(others)
        other.chmod(0o600)
        mine, theirs = file.read_bytes(), other.read_bytes()
        file.write_bytes(theirs)
        other.write_bytes(mine)
        return
    data = bytearray(file.read_bytes())
    first, second = chance.sample(range(max(2, len(data) // 4096)), 2)
    one, two = slice(first * 4096, first * 4096 + 4096), slice(second * 4096, second * 4096 + 4096)
    data[one], data[two] = data[two], data[one]
    file.write_bytes(data)


def delete(file: Path, chance: random.Random) -> None:
    file.unlink()


HARMS: list[Callable[[Path, random.Random], None]] = [flip, truncate, extend, swap, delete]


class Rot:
    """Copies of two stores, a clean one and one whose newest commits are in its WAL."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._made = {
            "plain": (folder / "plain", make_plain(folder / "plain")),
            "unclean": (folder / "unclean", make_unclean(zygote, folder / "unclean")),
        }
        self._path = folder / "hurt"
        self._places = self._shards_of_chains()

    def copy(self, name: str) -> tuple[Path, Ledger]:
        shutil.rmtree(self._path, ignore_errors=True)
        made, ledger = self._made[name]
        shutil.copytree(made, self._path)
        return self._path, Ledger(set(ledger.acks), dict(ledger.names), evicting=True)

    def _shards_of_chains(self) -> dict[Ack, set[str]]:
        path, ledger = self.copy("unclean")
        places = {}
        with kvdb.open(path) as store:
            known = namespaces(store)
            for ack in ledger.acks:
                match = store.match(known[ack[0]], random_tokens(ack[1], ack[2]))
                ids = [block.id for block in match.blocks]
                if match.shared is not None:
                    ids.append(match.shared.block.id)
                places[ack] = {location.shard for location in store.locate(ids).values()}
        return places

    def shard(self, chance: random.Random, totals: Totals) -> None:
        """A shard is hurt, while the store is closed or while it is open and has read it."""
        path, ledger = self.copy("plain")
        acks = set(ledger.acks)
        with kvdb.open(path) as store:
            if chance.random() < 0.5:
                read_back(store, ledger, Totals())
            file = chance.choice(shard_files(path))
            file.chmod(0o600)
            chance.choice(HARMS)(file, chance)
            found = store.verify(data=True)
            assert found.problems, f"nothing found in {file.name}"
            if chance.random() < 0.5:
                self._read(store, ledger, totals)
            assert store.verify(data=True, repair=True).ok
            again = store.verify(data=True, repair=True)
            assert again.problems == []
            before = store.sql(DAMAGED).rows
            self._read(store, Ledger(acks), totals)
            assert store.sql(DAMAGED).rows == before, "repair left damage to be found by a read"

    def _read(self, store: Store, ledger: Ledger, totals: Totals) -> None:
        read = Totals()
        read_back(store, ledger, read)
        totals.wrong += read.wrong
        totals.looked_up += read.looked_up
        # What is gone is a miss with its reason in a row.
        assert read.lost == 0 or store.sql(DAMAGED).rows[0][0] > 0

    def index(self, name: str, chance: random.Random, totals: Totals) -> None:
        """The index or its WAL is hurt: typed errors or misses, then rebuild gives all back."""
        path, ledger = self.copy("unclean")
        acks = set(ledger.acks)
        chance.choice(HARMS)(path / name, chance)
        said = outcome(lambda: self._use(path, ledger, totals))
        assert said == "ok" or said in SAID, said
        if said != "ok":
            totals.refused += 1
        # An index that lost commits or lies may have given up shards; what is left comes back.
        left = {file.stem for file in shard_files(path)}
        acks = {ack for ack in acks if self._places[ack] <= left}
        kvdb.rebuild(path)
        with kvdb.open(path) as store:
            after = Totals()
            read_back(store, Ledger(acks), after)
            totals.looked_up += after.looked_up
            totals.wrong += after.wrong
            totals.lost += after.lost
            assert store.verify(data=True).problems == []
            again = store.verify(data=True, repair=True)
            assert again.problems == []

    def _use(self, path: Path, ledger: Ledger, totals: Totals) -> None:
        with kvdb.open(path) as store:
            read = Totals()
            read_back(store, ledger, read)
            totals.wrong += read.wrong
            store.verify(data=True)


def rot_again_and_again(zygote: Zygote, folder: Path, run: Run) -> None:
    rot = Rot(zygote, folder)
    for step in run.steps():
        chance = random.Random(step)
        try:
            if step % 3:
                rot.shard(chance, run.totals)
            else:
                rot.index(chance.choice(("index.sqlite", "index.sqlite-wal")), chance, run.totals)
        except (AssertionError, IntegrityError) as error:
            error.add_note(f"rot number {step}")
            raise
        run.totals.tried += 1
    totals = run.totals
    assert (totals.wrong, totals.lost) == (0, 0), totals


def test_phantom_hits_after_rot_are_found_and_repaired_once(zygote: Zygote, tmp_path: Path) -> None:
    rot_again_and_again(zygote, tmp_path / "rot", Run("rot", SHORT))


@pytest.mark.torture
def test_phantom_hits_after_rot_are_found_five_thousand_times(zygote: Zygote) -> None:
    folder = torture_folder()
    rot_again_and_again(zygote, folder / "rot", Run("rot", LONG, folder))
