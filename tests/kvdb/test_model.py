"""A store under random operations, held against a plain model of what may be in it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvdb
from kvdb.check.rebuild import rebuild_store
from kvdb.reader import Damaged
from kvdb.sequences import Sequence
from kvdb.store import Store
from tests.support import (
    BLOCK,
    PLAIN,
    assert_true_state,
    buffers,
    check_prefix,
    open_namespace,
    payloads,
    put_all,
    random_tokens,
)

# Prompts over two tokens share prefixes of every length.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=70).map(
    lambda tokens: np.array(tokens, dtype=np.uint32)
)


class StoreMachine(RuleBasedStateMachine):
    """Whatever happens: what is read is true, refs are derived truth, verify finds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "store"
        self.put_prompts: list[np.ndarray] = []
        self.sequences: dict[str, np.ndarray] = {}
        self.handles: dict[str, Sequence] = {}
        self.made = 0
        self.store: Store
        self.open()

    def open(self) -> None:
        self.store = kvdb.open(self.path)
        self.namespace = open_namespace(self.store)

    @rule(tokens=PROMPTS)
    def put(self, tokens: np.ndarray) -> None:
        put_all(self.store, self.namespace, tokens)
        self.put_prompts.append(tokens)
        assert check_prefix(self.store, self.namespace, tokens) == len(tokens)

    @rule(tokens=PROMPTS)
    def read(self, tokens: np.ndarray) -> None:
        check_prefix(self.store, self.namespace, tokens)

    @precondition(lambda self: self.put_prompts)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        tokens = data.draw(st.sampled_from(self.put_prompts))
        match = self.store.match(self.namespace, tokens, share_tail=False)
        if match.complete:
            self.made += 1
            name = f"s{self.made}"
            self.handles[name] = self.store.sequence(self.namespace, match.tip_hash, name=name)
            self.sequences[name] = tokens

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        self.handles.pop(name).drop()
        del self.sequences[name]

    @rule()
    def evict(self) -> None:
        self.store.evict(to_bytes=0)
        left = self.store.sql("SELECT count(*) FROM blocks WHERE state = 'live'").rows[0][0]
        assert left == 0 or self.sequences

    @precondition(lambda self: self.put_prompts)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        tokens = data.draw(st.sampled_from(self.put_prompts))
        match = self.store.match(self.namespace, tokens)
        live = [block for block in match.blocks if block.live]
        if live:
            block = data.draw(st.sampled_from(live))
            location = self.store.locate([block.id])[block.id, "kv:0"]
            assert self.store.report_damage(location, Damaged("made by the test")) is None

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()
        self._find_sequences()

    @rule()
    def rebuild(self) -> None:
        self.store.close()
        report = rebuild_store(self.path)
        self.open()
        gone = {line.split("'")[1] for line in report.lost if line.startswith("sequence")}
        for name in gone:
            del self.sequences[name], self.handles[name]
        self._find_sequences()

    def _find_sequences(self) -> None:
        rows = self.store.sql("SELECT id, name FROM sequences").rows
        assert {name for _, name in rows} == set(self.sequences)
        self.handles = {name: Sequence(self.store, self.namespace, id_, name) for id_, name in rows}

    @invariant()
    def held_chains_keep_their_tokens(self) -> None:
        for name, tokens in self.sequences.items():
            assert np.array_equal(self.handles[name].tokens(), tokens)

    @invariant()
    def verify_finds_nothing(self) -> None:
        self.store.flush()
        assert self.store.verify(data=True).problems == []

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


StoreMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStore = StoreMachine.TestCase


@settings(max_examples=25, deadline=None)
@given(gone=st.sets(st.integers(0, 5)))
def test_any_subset_of_a_chain_removed_the_rest_is_found_and_a_refill_restores_it(
    gone: set[int],
) -> None:
    tokens = random_tokens(3, 5 * BLOCK + 7)
    with tempfile.TemporaryDirectory() as folder, kvdb.open(Path(folder) / "store") as store:
        namespace = open_namespace(store)
        put_all(store, namespace, tokens)
        # A held chain keeps its rows, so what is removed are holes.
        store.sequence(namespace, store.match(namespace, tokens).tip_hash, name="held")
        for block in store.match(namespace, tokens).blocks:
            if block.index in gone:
                location = store.locate([block.id])[block.id, "kv:0"]
                store.report_damage(location, Damaged("made by the test"))
        match = store.match(namespace, tokens)
        assert set(match.holes) == gone
        assert match.complete
        into = buffers(PLAIN, len(tokens))
        assert store.read(match, into).bad == ()
        for block in match.blocks:
            if block.live:
                assert_true_state(PLAIN, into, tokens, block.start, block.end)
        for hole in match.holes:
            prefix = tokens[: match.blocks[hole].end]
            made = payloads(namespace, prefix, first=hole)
            assert store.put(namespace, prefix, made).wait(30).dropped == 0
        assert check_prefix(store, namespace, tokens) == len(tokens)
