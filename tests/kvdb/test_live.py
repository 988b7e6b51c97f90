"""The live sections: the report's numbers, and prefixes found by look-ups that are counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvdb
from kvdb.report import Scope, prefixes, read_live
from kvdb.report.blocks import read_blocks
from kvdb.report.history import read_history
from kvdb.report.prefixes import parts_reached, shared_runs
from kvdb.report.tree import Run, prefix_tree
from kvdb.store import Store
from notebooks.sample_store import make_store


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path = make_store(tmp_path_factory.mktemp("live") / "store", days=2)
    with kvdb.open(path, read_only=True) as store:
        yield store


def _plain(runs: list[Run]) -> set[tuple[int, int, int, int]]:
    return {(run.block_id, run.start, run.end, run.hits) for run in runs}


def test_runs_are_those_of_the_whole_tree(sample: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ways to the same: a pass over all blocks, and look-ups from the roots on."""
    monkeypatch.setattr(prefixes, "MOST_RUNS", 10_000)
    monkeypatch.setattr(prefixes, "MOST_LOOKUPS", 100_000)
    tree = prefix_tree(read_blocks(sample.database), most=10_000, levels=100, smallest_share=0)
    with sample.database.read() as connection:
        runs = shared_runs(connection, [each.id for each in sample.namespaces()])
    assert len(runs) > 50
    assert _plain(runs) == _plain(list(tree.boxes))


def test_the_most_used_come_first_and_are_named(sample: Store) -> None:
    live = read_live(sample, Scope())
    (section,) = (each for each in live.sections if each.title == "What prompts have in common")
    assert section.table is not None
    first = dict(zip(section.table.headers, section.table.rows[0], strict=True))
    assert first["Reaches into"] == "system prompt"
    assert int(first["Used"].rstrip("×")) > 20
    with sample.database.read() as connection:
        history = read_history(connection, Scope())
    assert history is not None
    assert f"{history.total.requests:,}" in [tile.value for tile in live.tiles]


def test_look_ups_are_bounded(sample: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MOST_LOOKUPS", 20)
    ids = [each.id for each in sample.namespaces()]
    with sample.database.read() as connection:
        counted: list[str] = []
        connection.set_trace_callback(counted.append)
        runs = shared_runs(connection, ids)
        parts_reached(connection, runs)
        connection.set_trace_callback(None)
    assert runs
    assert len(counted) <= 20 + 20 + len(ids) + 1


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    with kvdb.open(tmp_path / "store", min_free_bytes=0) as store:
        said = [text for each in read_live(store, Scope()).sections for text in each.sentences]
    assert "The history holds no request that fits." in said
    assert "Nothing is stored yet." in said
    assert "No request missed." in said
