"""Exports while others write and evict: every snapshot imports, and verifies."""

from __future__ import annotations

import io
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest

import kvdb
from kvdb.layout import LayerSpec, Layout, TensorSpec
from kvdb.store import Store
from tests.snapshots.world import blocks
from tests.support import BLOCK, check_prefix, open_namespace, payloads, random_tokens

WRITERS = 4
PROMPTS = 40
MAX_BYTES = 16 << 20
WIDE = Layout((LayerSpec("KVCache", (TensorSpec("keys", "F32", (1, 1, 1024), 2),)),))  # 64 KiB


class Writer(threading.Thread):
    """Puts, reads and evicts through a store object of its own, as a process does."""

    def __init__(self, path: Path, seed: int, end: threading.Event) -> None:
        super().__init__()
        self.path, self.seed, self.end = path, seed, end
        self.failed: BaseException | None = None
        self.rounds = 0

    def run(self) -> None:
        try:
            with kvdb.open(self.path, min_free_bytes=0) as store:
                self.work(store, np.random.default_rng(self.seed))
        except BaseException as error:
            self.failed = error
            raise

    def work(self, store: Store, choose: np.random.Generator) -> None:
        namespace = open_namespace(store, WIDE)
        while not self.end.is_set():
            self.rounds += 1
            prompt, length = int(choose.integers(0, PROMPTS)), int(choose.integers(1, 8))
            tokens = random_tokens(prompt, length * BLOCK)
            store.put(namespace, tokens, payloads(namespace, tokens)).wait(60)
            if choose.random() < 0.2:
                store.evict(to_bytes=MAX_BYTES * 2 // 3)
            if choose.random() < 0.1:
                store.compact()


def export_beside_writers(folder: Path, times: int) -> None:
    end = threading.Event()
    kvdb.open(folder / "a", max_bytes=MAX_BYTES, min_free_bytes=0).close()
    writers = [Writer(folder / "a", seed, end) for seed in range(WRITERS)]
    for writer in writers:
        writer.start()
    taken = 0  # exports that came upon something: evictions may have left nothing
    try:
        with kvdb.open(folder / "a", min_free_bytes=0) as a:
            for number in itertools.count():
                if taken == times:
                    break
                assert number < 20 * times
                while sum(writer.rounds for writer in writers) < 40 + 10 * number:
                    assert not any(writer.failed for writer in writers)
                    end.wait(0.01)
                target = io.BytesIO()
                report = a.export_snapshot(target)
                with kvdb.open(folder / f"b{number}", max_bytes=64 << 20, min_free_bytes=0) as b:
                    came = b.import_snapshot(io.BytesIO(target.getvalue()))
                    assert came.stored == report.blocks == len(blocks(b))
                    assert not came.incompatible
                    assert b.verify(data=True).problems == []
                    namespace = open_namespace(b, WIDE)
                    for prompt in range(PROMPTS):
                        check_prefix(b, namespace, random_tokens(prompt, 7 * BLOCK))
                taken += report.blocks > 0
    finally:
        end.set()
        for writer in writers:
            writer.join()
    assert not any(writer.failed for writer in writers)
    with kvdb.open(folder / "a") as a:
        assert a.sql("SELECT count(*) FROM sequences").rows == [(0,)]
        assert a.verify(data=True).problems == []


def test_exports_beside_four_writers(tmp_path: Path) -> None:
    export_beside_writers(tmp_path, 2)


@pytest.mark.torture
def test_exports_beside_four_writers_twenty_times(tmp_path: Path) -> None:
    export_beside_writers(tmp_path, 20)
