"""Whatever the size of a snapshot, some of it is in memory at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvdb
from kvdb.layout import LayerSpec, Layout, TensorSpec
from kvdb.writer import Payload
from tests.support import BLOCK, open_namespace, random_tokens

BLOCK_BYTES = 4 << 20
LARGE = Layout(
    (LayerSpec("KVCache", (TensorSpec("keys", "F32", (1, 1, BLOCK_BYTES // 4 // BLOCK), 2),)),)
)
BLOCKS = 32
BOUND = (64 << 20) + 2 * BLOCK_BYTES

# Prints by how many bytes the verb's peak exceeds what the process took before it.
METER = """
import sys
import kvdb
from kvdb.snapshot import export, importing, verbs

def peak():
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024

verb, path, file = sys.argv[1:]
with kvdb.open(path) as store:
    before = peak()
    if verb == "export":
        store.export_snapshot(file)
    else:
        store.import_snapshot(file)
    print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_memory_is_bounded(tmp_path: Path) -> None:
    assert BLOCKS * BLOCK_BYTES > 1.5 * BOUND
    with kvdb.open(tmp_path / "a") as a:
        namespace = open_namespace(a, LARGE)
        tokens = random_tokens(1, BLOCKS * BLOCK)
        raw = tokens.view("u1").repeat(BLOCK_BYTES * BLOCKS // tokens.nbytes)
        made = [
            Payload(number, {"kv:0": raw[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]})
            for number in range(BLOCKS)
        ]
        assert a.put(namespace, tokens, made).wait(60).stored == BLOCKS
    for verb, store in (("export", "a"), ("import", "b")):
        command = [sys.executable, "-c", METER, verb, tmp_path / store, tmp_path / "a.tar"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert int(done.stdout) <= BOUND, verb
        print(verb, int(done.stdout) >> 20, "MiB")
    # Memory is used again while the bytes before are written: none may be another block's.
    with kvdb.open(tmp_path / "b") as b:
        assert b.verify(data=True).problems == []
