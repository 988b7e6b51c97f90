"""Replays: policies on examples worked out by hand, the real retention on a real trace, and the
program around them."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import kvdb
from kvdb.cli import cli
from kvdb.errors import KvdbError
from kvdb.simulate.history import read_history
from kvdb.simulate.replay import POLICIES, parse_capacities, parse_policies, replay
from kvdb.simulate.sql_policy import SqlPolicy
from kvdb.simulate.trace import Trace, read_trace
from kvdb.store import Store
from tests.kvdb.reference_policy import Retention as Reference
from tests.support import BLOCK, open_namespace, put_all, random_tokens

MOONCAKE = Path(__file__).parent.parent / "data/mooncake_conversation.jsonl.gz"
ONLINE = [name for name in POLICIES if name != "belady"]


def made(*chains: Sequence[int]) -> Trace:
    trace = Trace()
    for chain in chains:
        trace.add(chain)
    return trace


def hits(trace: Trace, policy: str, capacity: int) -> list[int]:
    cache = POLICIES[policy](trace, capacity)
    try:
        return [cache.request(chain) for chain, _ in trace.requests]
    finally:
        cache.close()


def letters(text: str) -> Trace:
    """One block a request."""
    return made(*([ord(letter)] for letter in text))


def random_trace(seed: int, requests: int = 400) -> Trace:
    """Prefixes of 40 random branches over 4 roots, unevenly popular, some going a new way."""
    random = np.random.default_rng(seed)
    branches = [
        [int(random.integers(4)), *random.integers(10, 99, int(random.integers(1, 9))).tolist()]
        for _ in range(40)
    ]
    trace = Trace()
    for number in range(requests):
        branch = branches[min(int(random.zipf(1.4)) - 1, 39)]
        chain = branch[: int(random.integers(1, len(branch) + 1))]
        trace.add([*chain, 1000 + number] if random.random() < 0.3 else chain)
    return trace


def slice_of_mooncake(requests: int) -> Trace:
    trace, whole = Trace(), read_trace(MOONCAKE)
    for chain, _ in whole.requests[:requests]:
        trace.add(chain)
    return trace


# -- policies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "capacity", "text", "expected"),
    [
        # c pushes out b, the oldest, though a was first.
        ("lru", 2, "abacab", [0, 0, 1, 0, 1, 0]),
        # The second a is what counts: b and c, seen once, make room for each other.
        ("lru-2", 2, "aabcab", [0, 1, 0, 0, 1, 0]),
        # As LRU-2, and b comes back from the history of blocks seen once.
        ("arc", 2, "aabcab", [0, 1, 0, 0, 1, 0]),
        # a, used twice, moves from the small queue to the main one when room is needed.
        ("s3-fifo", 2, "aaabcab", [0, 1, 1, 0, 0, 1, 0]),
        # The hand clears a's mark, passes it, takes b and is at the oldest again; for b as well,
        # it clears and passes a, and takes c; then a, not touched since, goes.
        ("sieve", 2, "aabcabca", [0, 1, 0, 0, 1, 0, 0, 0]),
        # a has 3 uses; b and c have 1 plus the age, 1 after b went, 2 after c.
        ("lfu-da", 2, "aaabcabd", [0, 1, 1, 0, 0, 1, 0, 0]),
        # d is used last of all, so it is not kept; with LRU nothing would hit.
        ("belady", 2, "abcdabc", [0, 0, 0, 0, 1, 1, 0]),
        # Seen again makes a hot; b, once seen, goes.
        ("kvdb", 2, "aabcab", [0, 1, 0, 0, 1, 0]),
    ],
)
def test_by_hand(policy: str, capacity: int, text: str, expected: list[int]) -> None:
    assert hits(letters(text), policy, capacity) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_prefix_semantics(policy: str) -> None:
    trace = made([1, 2, 3], [4, 2], [1, 2, 9], [1, 2, 3])
    # 2 after 4 is another block than 2 after 1, and all fit.
    assert trace.blocks == 6
    assert hits(trace, policy, 6) == [0, 0, 2, 3]
    # Of a chain that does not fit its beginning is kept, never its end alone.
    assert hits(made([1, 2, 3, 4], [1, 2, 3, 4]), policy, 2) == [0, 2]
    # A stranger takes the place of a leaf: what is left of the chain still hits.
    assert hits(made([1, 2, 3], [1, 2, 3], [7], [1], [1, 2, 3], [7]), policy, 3)[3] == 1


@pytest.mark.parametrize("policy", ONLINE)
@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_resident_is_a_tree_within_the_capacity(policy: str, seed: int) -> None:
    trace = random_trace(seed)
    cache: Any = POLICIES[policy](trace, 20)
    for chain, _ in trace.requests:
        cache.request(chain)
        if policy == "kvdb":
            kept = {int.from_bytes(hash_, "big") for hash_ in cache.live_hashes()}
        else:
            kept = {block for block in range(trace.blocks) if cache.resident[block]}
        assert len(kept) <= 20
        assert {trace.parents[block] for block in kept} <= kept | {-1}
    cache.close()


@pytest.mark.parametrize("capacity", [1, 7, 40])
def test_lru_against_an_ordered_dict(capacity: int) -> None:
    trace = random_trace(3)
    cache: OrderedDict[int, None] = OrderedDict()
    expected = []
    for chain, _ in trace.requests:
        found = 0
        while found < len(chain) and chain[found] in cache:
            found += 1
        expected.append(found)
        for block in reversed(chain[:found]):
            cache.move_to_end(block)
        while (
            cache and len(cache) + len(chain) - found > capacity and next(iter(cache)) not in chain
        ):
            cache.popitem(last=False)
        new = chain[found : found + capacity - len(cache)]
        for block in reversed(new):
            cache[block] = None
        for block in reversed(chain[:found]):  # ancestors are at least as young
            cache.move_to_end(block)
    assert hits(trace, "lru", capacity) == expected
    assert sum(expected) > 50


@pytest.mark.parametrize("seed", range(4))
def test_nothing_beats_belady(seed: int) -> None:
    trace = random_trace(seed, 200)
    for capacity in (1, 3, 10, 40):
        bound = sum(hits(trace, "belady", capacity))
        for policy in ONLINE:
            assert sum(hits(trace, policy, capacity)) <= bound, (policy, capacity)
    enough = {policy: sum(hits(trace, policy, trace.blocks)) for policy in POLICIES}
    assert len(set(enough.values())) == 1, enough


def test_belady_is_the_best_of_all_choices() -> None:
    """Against a search through every set of blocks that could be kept."""
    trace = random_trace(5, 9)
    capacity = 4
    states = {frozenset[int](): 0}
    for chain, _ in trace.requests:
        following: dict[frozenset[int], int] = {}
        for kept, before in states.items():
            found = 0
            while found < len(chain) and chain[found] in kept:
                found += 1
            for choice in _trees(kept | set(chain), trace.parents, capacity):
                following[choice] = max(following.get(choice, 0), before + found)
        states = following
    assert sum(hits(trace, "belady", capacity)) == max(states.values()) > 0


def _trees(blocks: frozenset[int], parents: list[int], size: int) -> set[frozenset[int]]:
    """All sets of at most so many blocks that hold the parents of what they hold."""
    found = {frozenset[int]()}
    for block in sorted(blocks):  # parents have lower numbers
        found |= {
            made | {block}
            for made in found
            if len(made) < size and (parents[block] < 0 or parents[block] in made)
        }
    return found


def test_sql_and_reference_agree_on_a_real_trace() -> None:
    trace = slice_of_mooncake(450)
    capacity = trace.blocks // 20
    sql, reference = SqlPolicy(capacity), Reference(capacity)
    total = 0
    for chain, _ in trace.requests:
        found = sql.request(chain)
        assert found == reference.request(chain)
        total += found
    kept = {int.from_bytes(hash_, "big") for hash_ in sql.live_hashes()}
    assert kept == {key for key, row in reference.by_key.items() if row.state == "live"}
    assert total > 400
    sql.close()


def test_answers_are_stored_and_not_counted() -> None:
    trace = Trace()
    trace.add([1, 2, 3], counted=2)
    trace.add([1, 2, 3, 4], counted=4)
    assert trace.references == 6
    for result in replay(trace, parse_capacities("100%"), list(POLICIES)):
        assert result.hit_ratio == 3 / 6, result


# -- files ---------------------------------------------------------------------------------------


def test_the_trace_is_the_published_one() -> None:
    trace = read_trace(MOONCAKE)
    assert (len(trace.requests), trace.references, trace.blocks) == (12_031, 288_500, 182_790)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["simulate", *map(str, arguments)])


def sentence(result: Result) -> str:
    assert "Traceback" not in result.output
    assert result.stdout == ""
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert last.endswith(".")
    return last


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "small.jsonl"
    lines = [{"timestamp": 0, "hash_ids": chain} for chain in ([1, 2], [1, 3], [1, 2], [])]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return file


def test_json_has_a_row_for_every_policy_and_capacity(small: Path) -> None:
    result = run("--trace", small, "--capacity", "34%,100%", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["policy"], row["capacity"]) for row in rows] == [
        (policy, capacity) for policy in POLICIES for capacity in ("34%", "100%")
    ]
    ratios = {(row["policy"], row["capacity"]): row["hit_ratio"] for row in rows}
    assert {ratios[policy, "100%"] for policy in POLICIES} == {3 / 6}
    assert {ratios[policy, "34%"] for policy in POLICIES} == {2 / 6}
    assert {row["capacity_blocks"] for row in rows} == {1, 3}


def test_the_table(small: Path) -> None:
    result = run("--trace", small, "--capacity", "100%", "--policy", "lru,kvdb")
    words = [line.split() for line in result.stdout.splitlines()]
    assert words[0] == ["hit", "%", "100%"]
    assert words[2:] == [["lru", "50.0"], ["kvdb", "50.0"]]
    assert "4 requests, 6 block references, 3 different blocks." in result.stderr


def test_gzip_is_known_by_its_content(small: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(small.read_bytes()))
    assert read_trace(packed).requests == read_trace(small).requests


GOOD = b'{"hash_ids": [1, 2]}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no requests"),
        (b"\n\n", "holds no requests"),
        (b'{"hash_ids": []}\n', "holds no requests"),
        (GOOD + b"hello\n", "line 2: not JSON"),
        (GOOD + b"\n\xff\xfe\n", "line 3: not JSON"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b"[1, 2]\n", "line 1: not an object with hash_ids"),
        (b'{"timestamp": 1}\n', "line 1: not an object with hash_ids"),
        (b'{"hash_ids": 7}\n', "line 1: hash_ids is not a list of integers"),
        (GOOD + b'{"hash_ids": ["a"]}\n', "line 2: hash_ids is not a list of integers"),
        (b'{"hash_ids": [1.0, true]}\n', "line 1: hash_ids is not a list of integers"),
        (b" " * (17 << 20), "line 1: longer than any trace's"),
        (gzip.compress(GOOD * 9)[:-12], "damaged gzip"),
        (b"\x1f\x8bnonsense", "damaged gzip"),
    ],
)
def test_a_bad_trace_is_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(content)
    result = run("--trace", file)
    assert result.exit_code == 2
    assert said in sentence(result)


def test_a_missing_trace(tmp_path: Path) -> None:
    result = run("--trace", tmp_path / "none")
    assert result.exit_code == 2
    assert "There is no trace at" in sentence(result)
    assert run("--trace", tmp_path).exit_code == 2


@pytest.mark.parametrize("capacity", ["0%", "200%", "5", "", "x%", "-1%", "1%,,5%", "nan%", "1e1%"])
def test_a_bad_capacity(small: Path, capacity: str) -> None:
    result = run("--trace", small, "--capacity", capacity)
    assert result.exit_code == 2
    sentence(result)


def test_an_unknown_policy_names_those_there_are(small: Path) -> None:
    result = run("--trace", small, "--policy", "lru,mru")
    assert result.exit_code == 2
    assert "'mru' is no policy; there are kvdb, lru," in sentence(result)
    assert parse_policies("LRU, lru") == ["lru"]


def test_the_help_names_every_policy() -> None:
    said = re.sub(r"\s+", "", run("--help").stdout)  # click breaks lines at hyphens
    assert f"Onlytheseof{','.join(POLICIES)}." in said


# -- pictures ------------------------------------------------------------------------------------


def test_a_picture_is_drawn(small: Path, tmp_path: Path) -> None:
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for suffix, start in begins.items():
        picture = tmp_path / f"picture.{suffix}"
        picture.write_bytes(b"old")
        result = run("--trace", small, "--policy", "lru,kvdb,belady", "--plot", picture)
        assert result.exit_code == 0, result.output
        assert picture.read_bytes().startswith(start)


def test_a_picture_that_cannot_be_drawn_is_said_before_the_work(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "must end in" in sentence(run("--trace", small, "--plot", tmp_path / "a.docx"))
    assert "no folder" in sentence(run("--trace", small, "--plot", tmp_path / "no/a.png"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("--trace", small, "--plot", tmp_path / "a.png")
    assert result.exit_code == 1
    assert "pip install matplotlib" in sentence(result)


# -- the program ---------------------------------------------------------------------------------


def test_ctrl_c_ends_with_130() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvdb", "simulate", "--trace", MOONCAKE, "--policy", "kvdb"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "12,031 requests" in process.stderr.readline()  # said when the replay begins
    assert "Replaying: " in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.strip().splitlines()[-1] == "Error: Interrupted."
    assert time.monotonic() - started < 10


# -- a store's own history -----------------------------------------------------------------------


def record(store: Store, tokens: Any, prompt: int, **fields: Any) -> None:
    """A request whose prompt is the first of ``tokens``, all of which are stored unless said."""
    namespace = open_namespace(store)
    match = store.match(namespace, tokens)
    store.record(
        kvdb.RequestRecord(
            **{
                "started_at": 0,
                "namespace_id": namespace.id,
                "prompt_tokens": prompt,
                "restored_tokens": 0,
                "refilled_tokens": 0,
                "computed_tokens": prompt,
                "generated_tokens": len(tokens) - prompt,
                "skip": "none",
                "deepest_block_id": match.tip_id,
                "tip_hash": match.tip_hash,
                **fields,
            }
        )
    )
    assert store.flush(30)


def test_a_stores_history_is_replayed(store: Store, path: Path) -> None:
    namespace = open_namespace(store)
    first, other = random_tokens(1, 4 * BLOCK), random_tokens(2, BLOCK)
    for tokens in (first, other):
        put_all(store, namespace, tokens)
    record(store, first, 2 * BLOCK + 1)  # three blocks asked for, one more answered
    record(store, other, BLOCK)
    record(store, first, 4 * BLOCK)
    record(store, first[: 2 * BLOCK], 2 * BLOCK, tip_hash=None)  # in part
    record(store, random_tokens(3, 40), 40)  # never stored
    record(store, first[:BLOCK], BLOCK // 2, generated_tokens=0)  # of more tokens than it had

    trace, coverage = read_history(store.database)
    assert (coverage.requests, coverage.whole, coverage.in_part, coverage.lost) == (6, 3, 1, 2)
    assert [(len(chain), counted) for chain, counted in trace.requests] == [
        (4, 3),
        (1, 1),
        (4, 4),
        (2, 2),
    ]
    assert (trace.blocks, trace.references) == (5, 10)

    store.close()
    result = run("--store", path, "--capacity", "100%", "--json", "--policy", "kvdb,lru")
    assert result.exit_code == 0, result.output
    assert [row["hit_ratio"] for row in json.loads(result.stdout)] == [6 / 10, 6 / 10]
    assert "Of 6 requests in the store's history, 3 can be replayed whole" in result.stderr


def test_evicted_blocks_are_replayed_too(store: Store) -> None:
    tokens = random_tokens(1, 3 * BLOCK)
    put_all(store, open_namespace(store), tokens)
    record(store, tokens, 3 * BLOCK)
    assert store.evict(to_bytes=0).blocks == 3
    trace, coverage = read_history(store.database)
    assert (coverage.whole, len(trace.requests[0].chain)) == (1, 3)


def test_a_store_without_history(store: Store, path: Path) -> None:
    with pytest.raises(KvdbError, match="holds no requests yet"):
        read_history(store.database)
    record(store, random_tokens(3, 40), 40)
    with pytest.raises(KvdbError, match="None of the 1 requests"):
        read_history(store.database)
    store.close()
    assert run("--store", path).exit_code == 1
    assert run("--store", path / "none").exit_code == 10
