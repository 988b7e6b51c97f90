"""Hashes and fingerprints, held against values made by other programs and by hand."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb.errors import UsageError
from kvdb.identity import (
    ExtraKey,
    ModelIdentity,
    as_tokens,
    block_hash,
    chain_hashes,
    check_block_tokens,
    decode_extra,
    encode_extra,
    namespace_fingerprint,
)
from tests.support import MIXED, PLAIN

NAMESPACE = bytes(range(32))

# printf of the documented bytes, piped through coreutils' sha256sum:
# "kvdb/block/1\0" + 00..1f + 32 zeros + u32 3 + u32 1,2,3 + u32 0
GOLDEN_ROOT = "469f5e4e5db2b69733fe56a6d50e77c8f4ce0f892757d2d779f5e167dbbdbe96"


def test_block_hash_equals_sha256sum_of_the_documented_bytes() -> None:
    assert block_hash(NAMESPACE, bytes(32), as_tokens([1, 2, 3])).hex() == GOLDEN_ROOT


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.sampled_from([16, 32]))
def test_chain_hashes_follow_the_definition(tokens: list[int], block_tokens: int) -> None:
    parent = bytes(32)
    want = []
    for start in range(0, len(tokens), block_tokens):
        own = tokens[start : start + block_tokens]
        body = b"kvdb/block/1\0" + NAMESPACE + parent + struct.pack("<I", len(own))
        body += struct.pack(f"<{len(own)}I", *own) + struct.pack("<I", 0)
        parent = hashlib.sha256(body).digest()
        want.append(parent)
    assert chain_hashes(NAMESPACE, as_tokens(tokens), block_tokens) == want


def test_key_fields_never_run_together() -> None:
    identity = ModelIdentity("w", "c", adapters=("x",))
    other = ModelIdentity("w", "c", adapters=("",))
    assert namespace_fingerprint(identity, PLAIN, 16, b"") != namespace_fingerprint(
        other, PLAIN, 16, b"x"
    )
    tokens = as_tokens([1, 2])
    hashes = {
        block_hash(NAMESPACE, bytes(32), tokens, extra)
        for extra in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""], [])
    }
    assert len(hashes) == 5


def test_extra_key_is_never_truncated() -> None:
    common = bytes(4096)
    first, second = ([ExtraKey(3, common + end)] for end in (b"a", b"b"))
    tokens = as_tokens(range(40))
    a, b = (chain_hashes(NAMESPACE, tokens, 16, keys) for keys in (first, second))
    assert all(x != y for x, y in zip(a, b, strict=True))


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_extra_keys_round_trip(extra: list[bytes]) -> None:
    assert decode_extra(encode_extra(extra)) == extra


def test_per_process_hashing_is_absent() -> None:
    code = (
        "from kvdb.identity import *; from tests.support import MIXED;"
        "print(namespace_fingerprint(ModelIdentity('w','c',{'b':'1','a':'2'}), MIXED, 16).hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    identity = ModelIdentity("w", "c", {"a": "2", "b": "1"})
    assert seen == {namespace_fingerprint(identity, MIXED, 16).hex() + "\n"}


def test_everything_that_changes_state_changes_the_fingerprint() -> None:
    identity = ModelIdentity("w", "c")
    prints = [
        namespace_fingerprint(identity, PLAIN, 16),
        namespace_fingerprint(identity, PLAIN, 32),
        namespace_fingerprint(identity, MIXED, 16),
        namespace_fingerprint(identity, PLAIN, 16, b"salt"),
        namespace_fingerprint(identity, PLAIN, 16, build="b"),
        namespace_fingerprint(ModelIdentity("w2", "c"), PLAIN, 16),
        namespace_fingerprint(ModelIdentity("w", "c2"), PLAIN, 16),
        namespace_fingerprint(ModelIdentity("w", "c", {"rope_theta": "1"}), PLAIN, 16),
        namespace_fingerprint(ModelIdentity("w", "c", code="x"), PLAIN, 16),
    ]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("size", [0, 8, 17, 100, 8192, -16])
def test_bad_block_sizes_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match="power of two"):
        check_block_tokens(size)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [[1, 2]], [1.5]])
def test_bad_tokens_are_refused(tokens: list[object]) -> None:
    with pytest.raises(UsageError):
        as_tokens(np.asarray(tokens))
