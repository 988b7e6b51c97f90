"""The report: one page that stands alone, with the store's own numbers, whatever is named how."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

import kvdb
from kvdb.report import Scope, make_report, words
from kvdb.report.blocks import HeldBlocks, read_blocks
from kvdb.report.tree import prefix_tree
from kvdb.store import Store
from notebooks.sample_store import make_store
from tests.support import open_namespace, put_all, random_tokens

# One of each kind: a tag, an attribute's end, a script's end, a template, an entity, plotly's own
# markup, templates and formulas, control and direction characters.
HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "</script><!--<script>",
    "{{ 7 * 7 }}{% raw %}%{label}$x^2$",
    "&lt;b&gt;<b>bold</b><a href='javascript:alert(1)'>x</a><br>",
    "NUL\x00 and \u202egnp.exe \ud83d\ude08".encode("utf-16", "surrogatepass").decode("utf-16"),
)
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "section", "script"),
    *("h1", "h2", "h3", "p", "ul", "ol", "li", "dl", "dt", "dd", "strong", "bdi", "div"),
    *("table", "thead", "tbody", "tr", "th", "td", "noscript"),
}


class Page(HTMLParser):
    """A page as a browser would take it apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._inside = tag
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            kind, before = self.scripts[-1]
            self.scripts[-1] = (kind, before + data)
        elif self._inside != "style":
            self.text += data

    @property
    def figures(self) -> dict[str, Any]:
        (document,) = (json.loads(text) for kind, text in self.scripts if kind)
        return dict(document)

    def bars(self, name: str) -> float:
        """The sum of all bars of a series, wherever it is drawn."""
        (series,) = (
            trace
            for figure in self.figures.values()
            for trace in figure["data"]
            if trace.get("name") == name
        )
        return float(sum(series["y"]))


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Two days of four tenants; some blocks were evicted. Its writer stays open."""
    path = make_store(tmp_path_factory.mktemp("report") / "store", days=2)
    with kvdb.open(path, min_free_bytes=0) as writer, kvdb.open(path, read_only=True) as store:
        writer.record(_request(writer.namespaces()[0].id, restored=7))
        writer.flush()
        writer.evict(to_bytes=writer.info().bytes - 1_000_000)
        yield store


def _request(namespace_id: int | None, restored: int = 0, **fields: Any) -> kvdb.RequestRecord:
    return kvdb.RequestRecord(
        started_at=1_790_000_000_000_000,
        namespace_id=namespace_id,
        prompt_tokens=100,
        restored_tokens=restored,
        refilled_tokens=0,
        computed_tokens=100 - restored,
        generated_tokens=1,
        skip="partial" if restored else "none",
        prefill_ms=50.0,
        **fields,
    )


def _one(store: Store, sql: str, *parameters: Any) -> Any:
    ((value,),) = store.sql(sql, parameters).rows
    return value


def test_the_page_asks_nothing_of_a_network(sample: Store) -> None:
    page = Page(make_report(sample, Scope()))
    assert page.tags <= TAGS
    assert not [a for a in page.attributes if a[1] in ("src", "href", "action", "srcset", "data")]
    policy = next(value for _, name, value in page.attributes if "default-src" in value)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    for kind, text in page.scripts:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert kind == "application/json" or f"'sha256-{digest}'" in policy
    assert "connect-src" not in policy


def test_its_numbers_are_those_of_the_tables(sample: Store) -> None:
    page = Page(make_report(sample, Scope()))
    restored = _one(sample, "SELECT sum(restored_tokens) FROM requests")
    computed = _one(sample, "SELECT sum(computed_tokens + refilled_tokens) FROM requests")
    assert page.bars("restored") == restored
    assert page.bars("computed") == computed
    assert words.percent(restored / (restored + computed)) in page.text
    saved = _one(sample, "SELECT sum(seconds_saved) FROM savings")
    assert page.bars("seconds saved") == pytest.approx(saved, abs=0.1)
    evicted = _one(sample, "SELECT count(*) FROM evictions WHERE reason = 'manual'")
    assert page.bars("removed by hand") == evicted > 0
    assert page.bars("never used again") == _one(
        sample, "SELECT count(*) FROM blocks WHERE state = 'live' AND hits = 0"
    )
    icicle = next(f for f in page.figures.values() if f["data"][0]["type"] == "icicle")["data"][0]
    (root,) = (v for v, p in zip(icicle["values"], icicle["parents"], strict=True) if p == "")
    assert root == _one(sample, "SELECT sum(token_count) FROM block_usage")
    slowest = _one(
        sample, "SELECT max(prefill_ms) / 1e3 FROM requests WHERE deepest_block_id IS NULL"
    )
    assert words.duration(slowest) in page.text


def test_a_scope_leaves_out_the_rest(sample: Store) -> None:
    hour = 3_600_000_000
    since = _one(sample, "SELECT max(started_at) FROM requests") - 12 * hour
    page = Page(make_report(sample, Scope(since, 1, "support")))
    assert page.bars("restored") == _one(
        sample,
        "SELECT sum(restored_tokens) FROM requests "
        "WHERE tenant = 'support' AND namespace_id = 1 AND started_at >= ?",
        since // hour * hour,
    )
    assert "only tenant support" in page.text
    assert "nightly" not in page.text
    nobody = Page(make_report(sample, Scope(tenant="nobody")))
    assert "The history holds no request that fits." in nobody.text


def test_prompts_are_shown_only_with_a_decoder(sample: Store) -> None:
    without = Page(make_report(sample, Scope()))
    assert "dd" not in without.tags
    assert "Begins with" not in without.text
    shown = Page(make_report(sample, Scope(), lambda _: lambda ids: f"<|im_start|>{len(ids)} ids"))
    assert "dd" in shown.tags
    assert "24 ids" in shown.text
    assert "24 ids" in json.dumps(shown.figures)


def test_figures_are_what_plotly_knows(sample: Store) -> None:
    figures = Page(make_report(sample, Scope())).figures
    assert len(figures) == 8
    for figure in figures.values():
        go.Figure(figure)


def test_hostile_names_stay_text(path: Path) -> None:
    with kvdb.open(path, min_free_bytes=0) as store:
        for number, name in enumerate(HOSTILE):
            identity = kvdb.ModelIdentity(str(number), "c")
            layout = open_namespace(store).layout
            namespace = store.namespace(identity, layout, model=name, block_tokens=16, tenant=name)
            put_all(store, namespace, random_tokens(number, 40))
            store.record(_request(namespace.id, tenant=name, client=name, miss_reason=name or None))
        store.flush()
        texts = iter(HOSTILE * 100)
        page = Page(make_report(store, Scope(tenant=None), lambda _: lambda ids: next(texts)))
    assert page.tags <= TAGS
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "49" not in page.text
    assert "\x00" not in page.text + json.dumps(page.figures)
    assert "\u202e" not in page.text
    assert "<script>alert(1)</script>" in page.text
    for figure in page.figures.values():
        for text in re.findall(r'"((?:[^"\\]|\\.)*)"', json.dumps(figure, ensure_ascii=False)):
            ours = re.sub(r"</?b>|<br>|<extra></extra>", "", text)
            assert "<" not in ours, text
            assert "$" not in ours, text


def test_an_empty_store_and_one_with_one_request(store: Store) -> None:
    page = Page(make_report(store, Scope()))
    assert "The history holds no request that fits." in page.text
    assert "It holds no blocks." in page.text
    assert page.figures == {}
    store.record(_request(None))
    store.flush()
    page = Page(make_report(store, Scope()))
    assert "Of 100 prompt tokens, 0 (0 %)" in page.text
    assert "Nothing was restored, so no time was saved." in page.text
    assert len(page.figures) == 2


def _forest(seed: int, count: int) -> HeldBlocks:
    """Random trees, with parents stored before and after their children."""
    chance = random.Random(seed)
    parents = [chance.choice([0, *range(max(1, n - 9), n)]) for n in range(1, count + 1)]
    depths = [0] * (count + 1)
    for n, parent in enumerate(parents, start=1):
        depths[n] = depths[parent] + 1 if parent else 0
    new = dict(zip(range(1, count + 1), chance.sample(range(1, count + 1), count), strict=True))
    rows = sorted(
        (new[n], new.get(parents[n - 1], 0), 1, depths[n], chance.randint(1, 64), n % 4, 0)
        for n in range(1, count + 1)
    )
    return HeldBlocks(*np.array(rows).T, complete=True)


@pytest.mark.parametrize("seed", range(4))
def test_the_tree_adds_up(seed: int) -> None:
    blocks = _forest(seed, 300)
    tokens = dict(zip(blocks.id.tolist(), blocks.tokens.tolist(), strict=True))
    parents = dict(zip(blocks.id.tolist(), blocks.parent.tolist(), strict=True))
    below = dict.fromkeys(tokens, 0)
    for id_, count in tokens.items():
        while id_:
            below[id_] += count
            id_ = parents[id_]
    tree = prefix_tree(blocks, most=40, levels=5)
    assert tree.tokens == sum(tokens.values())
    assert 0 < len(tree.boxes) <= 40
    for box in tree.boxes:
        assert box.subtree_tokens == below[box.block_id]
        if box.parent >= 0:
            assert box.start == tree.boxes[box.parent].end
    shown = sum(box.end - box.start for box in tree.boxes)
    assert tree.tokens == shown + sum(rest.tokens for rest in tree.rests)
    whole = prefix_tree(blocks, most=10_000, levels=10_000, smallest_share=0)
    assert whole.tokens == sum(box.end - box.start for box in whole.boxes)
    assert whole.rests == []


def test_blocks_beyond_the_most_are_said(sample: Store) -> None:
    blocks = read_blocks(sample.database, most=10)
    assert (len(blocks), blocks.complete) == (10, False)
    assert read_blocks(sample.database).complete


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0123, "0.012 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (5372, "1 h 29 min"),
        (86400 * 3 + 7200, "3 days 2 h"),
        (-5, "−5 s"),
    ],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text
