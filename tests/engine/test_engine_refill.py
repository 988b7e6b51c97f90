"""Any part of a chain may be gone: the rest is found, and refilling gives equal logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import Run, equal, prompt_tokens, run

import kvdb
from engine import Engine, EngineOptions
from engine.storage import Storage
from kvdb.shards import shard_path
from kvdb.store import Store

WHERE = (
    "SELECT s.uuid, p.offset, p.nbytes FROM parts AS p JOIN shards AS s ON s.id = p.shard_id "
    "WHERE p.block_id = ? AND p.part = ?"
)
BLOCK = 64
LENGTH = 600
BLOCKS = -(-LENGTH // BLOCK)


class Chain:
    """A stored chain in a key space of its own, whose payloads can be broken one by one."""

    def __init__(self, store: Store, engine: Engine, reuse: str, salt: int) -> None:
        self.store, self.engine, self.reuse = store, engine, reuse

        def change(worker: Any) -> None:
            namespace = store.namespace(
                worker.loaded.identity,
                worker.layout,
                block_tokens=BLOCK,
                salt=salt.to_bytes(4, "little"),
            )
            build = store.build(namespace, "the build of this test", worker.description)
            worker.storage = Storage(store, namespace, build)

        engine.call(change)
        self.namespace, self.build = engine.call(
            lambda worker: (worker.storage.namespace, worker.storage.build)
        )
        self.first = run(engine, prompt_tokens(LENGTH), reuse=reuse, read=False, store=False)
        # One token: a generated tail would share the prompt's last block with it.
        run(engine, prompt_tokens(LENGTH), reuse=reuse, max_tokens=1)

    def locate(self, index: int, part: str = "kv:0") -> tuple[Path, int, int]:
        """The file, offset and length of one part; the file made writable."""
        block = self.store.match(self.namespace, prompt_tokens(LENGTH)).blocks[index]
        ((uuid, offset, nbytes),) = self.store.sql(WHERE, (block.id, part)).rows
        path = shard_path(self.store.path, uuid)
        path.chmod(0o600)
        return path, offset, nbytes

    def breaks(self, indices: set[int]) -> None:
        """Change one byte in the middle of each block's state."""
        for index in indices:
            path, offset, nbytes = self.locate(index)
            with path.open("r+b") as file:
                file.seek(offset + nbytes // 2)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 0xFF]))

    def notice(self) -> None:
        """Read everything, so that what is broken is known to be gone before the next request."""
        match = self.store.match(self.namespace, prompt_tokens(LENGTH))
        layout = self.namespace.layout
        into = {
            part.name: [
                [np.empty(spec.full_shape(LENGTH), spec.numpy_dtype) for spec in part.tensors]
                for _ in part.layers
            ]
            for part in layout.parts
            if part.kind == "kv"
        }
        self.store.read(match, into)


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Engine]]:
    with (
        kvdb.open(tmp_path_factory.mktemp("refill") / "store", min_free_bytes=0) as store,
        Engine(store, str(tiny), options=EngineOptions(BLOCK)) as engine,
    ):
        yield store, engine


salts = iter(range(1, 1 << 30))


@pytest.mark.parametrize("noticed", [True, False], ids=["holes", "broken at read"])
@pytest.mark.parametrize("reuse", ["max", "exact"])
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(gone=st.sets(st.integers(0, BLOCKS - 1)))
def test_any_subset_of_payloads_may_be_gone(
    pair: tuple[Store, Engine], reuse: str, noticed: bool, gone: set[int]
) -> None:
    chain = Chain(*pair, reuse, next(salts))
    chain.breaks(gone)
    if noticed:
        chain.notice()
    again = run(chain.engine, prompt_tokens(LENGTH), reuse=reuse)
    assert equal(chain.first, again, reuse)
    stats = again.stats
    kept = [index for index in range(BLOCKS) if index not in gone]
    sizes = [min(BLOCK, LENGTH - index * BLOCK) for index in range(BLOCKS)]
    assert stats.restored_tokens == sum(sizes[index] for index in kept)
    assert stats.forwarded_prompt_tokens == LENGTH - stats.restored_tokens
    holes = [index for index in gone if kept and index < kept[-1]]
    assert stats.refilled_tokens == sum(sizes[index] for index in holes)
    healed = run(chain.engine, prompt_tokens(LENGTH), reuse=reuse)
    assert healed.stats.skip == "full"
    assert equal(chain.first, healed, reuse)


def test_a_damaged_logits_part_costs_one_token(pair: tuple[Store, Engine]) -> None:
    chain = Chain(*pair, "max", next(salts))
    path, offset, _ = chain.locate(BLOCKS - 1, "logits")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\0" * 8)
    again = run(chain.engine, prompt_tokens(LENGTH))
    assert again.stats.computed_tokens == 1
    assert equal(chain.first, again, "max")
    assert run(chain.engine, prompt_tokens(LENGTH)).stats.skip == "full"


def test_deleted_shards_stop_no_request(pair: tuple[Store, Engine]) -> None:
    chain = Chain(*pair, "max", next(salts))
    for path in {chain.locate(index)[0] for index in range(BLOCKS)}:
        path.unlink()
    again: Run = run(chain.engine, prompt_tokens(LENGTH))
    assert equal(chain.first, again, "max")
    assert again.stats.computed_tokens == LENGTH
    assert again.stats.miss_reason == "damaged"
    assert run(chain.engine, prompt_tokens(LENGTH)).stats.skip == "full"


def test_a_truncated_shard_stops_no_request(pair: tuple[Store, Engine]) -> None:
    chain = Chain(*pair, "max", next(salts))
    path, _, _ = chain.locate(3)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    again = run(chain.engine, prompt_tokens(LENGTH))
    assert equal(chain.first, again, "max")
    assert run(chain.engine, prompt_tokens(LENGTH)).stats.skip == "full"
