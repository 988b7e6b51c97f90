"""Requests that do not hit since their state is elsewhere, gone, or was never kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_model import write_chat_model
from explain_bench import BLOCK, SYSTEM, Bench, Make, ids, system, user
from many import settle
from tiny_model import write_adapter

import kvdb
from engine import Progress, Request
from kvdb.clock import Environment
from kvdb.explain import Explanation
from kvdb.opening import Options, open_store
from kvdb.shards import shard_path


def test_another_model_has_it(tmp_path: Path, bench: Make) -> None:
    bench().ask([system(), user()])
    other = bench(write_chat_model(tmp_path / "other", seed=1))
    request = other.ask([system(), user()])
    check_elsewhere(other, request, "other_model")


def test_another_adapter_has_it(tmp_path: Path, bench: Make) -> None:
    bench().ask([system(), user()])
    other = bench(adapter=write_adapter(tmp_path / "adapter", seed=3))
    check_elsewhere(other, other.ask([system(), user()]), "other_adapter")


def test_other_kv_bits_have_it(bench: Make) -> None:
    bench(kv_bits=8, kv_group_size=32).ask([system(), user()])
    other = bench()
    request = other.ask([system(), user()])
    assert "8-bit KV in groups of 32" in check_elsewhere(other, request, "other_kv_bits").diagnosis


def test_another_block_size_has_it(bench: Make) -> None:
    bench(block_tokens=64).ask([system(), user()])
    other = bench()
    found = check_elsewhere(other, other.ask([system(), user()]), "other_block_size")
    assert "blocks of 64 tokens" in found.diagnosis


def check_elsewhere(made: Bench, request: int, code: str) -> Explanation:
    found = made.why(request)
    whole = len(ids(made.model, [system(), user()]))
    assert (found.code, found.hit_tokens, found.neighbour) == (code, 0, "namespace 1")
    # The other one holds the prompt and the answer's tail as one block: whole blocks are compared.
    assert whole - 64 < found.saving_tokens <= whole
    return found


# -- lost, and never stored ----------------------------------------------------------------------


def test_evicted_by_hand(bench: Make) -> None:
    made = bench()
    made.ask([system(), user()])
    made.store.evict(to_bytes=0)
    (when,) = made.store.sql("SELECT max(evicted_at) FROM evictions").rows[0]
    before = made.would([system(), user()])
    found = made.why(made.ask([system(), user()]))
    for one in (before, found):
        assert (one.code, one.differing_token, one.hit_tokens) == ("evicted", 0, 0)
        assert one.diagnosis.endswith(" UTC by hand.")
        assert "more room" not in one.advice
        assert iso(when) in one.diagnosis
        whole = len(ids(made.model, [system(), user()]))
        assert whole - BLOCK < one.saving_tokens <= whole


def iso(us: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


@pytest.fixture
def small(tmp_path: Path, make_engine: Any) -> Iterator[Callable[[int], Bench]]:
    """A store of 16 MiB with a model that fills it in 2,000 tokens."""
    model = write_chat_model(tmp_path / "wide", num_hidden_layers=16, num_key_value_heads=2)
    with kvdb.open(tmp_path / "small", max_bytes=16 << 20, min_free_bytes=0) as store:
        engines = []

        def make(block_tokens: int) -> Bench:
            engines.append(make_engine(store, model, block_tokens=block_tokens))
            return Bench(store, engines[-1], model)

        yield make
        for engine in engines:
            engine.close()


def test_evicted_by_the_limit(small: Callable[[int], Bench]) -> None:
    made = small(BLOCK)
    made.ask([system(), user()])
    for n in range(8):
        made.ask([system(f"{n} other words " * 60), user(f"{n}")], max_tokens=1)
    found = made.would([system(), user()])
    assert found.code == "evicted"
    assert "the store was full" in found.diagnosis
    with made.store.database.write() as connection:
        connection.execute("DELETE FROM evictions")
    found = made.would([system(), user()])
    assert found.diagnosis.endswith("some time ago; why is no longer known.")


def test_a_pin_that_expired(tmp_path: Path, chat_model: Path, make_engine: Any) -> None:
    clock = [1_800_000_000_000_000]
    environment = Environment(now_us=lambda: clock[0])
    options = Options(min_free_bytes=0)
    with open_store(tmp_path / "pinned", options, environment=environment) as store:
        made = Bench(store, make_engine(store, chat_model, block_tokens=BLOCK), chat_model)
        made.ask([system(), user()])
        (tip,) = store.sql("SELECT hash FROM blocks ORDER BY depth DESC LIMIT 1").rows[0]
        store.sequence(store.namespaces()[0], tip, name="agent", ttl_seconds=60)
        store.evict(to_bytes=0)
        assert made.would([system(), user()]).code == "hit"
        clock[0] += 61_000_000
        store.evict(to_bytes=0)
        found = made.would([system(), user()])
        assert found.code == "expired"
        assert "held until agent expired" in found.diagnosis
        made.engine.close()


def test_damage(bench: Make) -> None:
    made = bench()
    made.ask([system(), user()])
    (uuid, offset) = made.store.sql(
        "SELECT s.uuid, p.offset FROM parts AS p JOIN shards AS s ON s.id = p.shard_id "
        "JOIN blocks AS b ON b.id = p.block_id WHERE b.depth = 1 AND part = 'kv:0'"
    ).rows[0]
    path = shard_path(made.store.path, uuid)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    start = int.from_bytes(data[:8], "little") + 8
    data[start + offset + 5] ^= 0xFF
    path.write_bytes(data)
    request = made.ask([system(), user()])
    found = made.why(request)
    assert (found.code, found.differing_token) == ("damaged", BLOCK)
    assert found.hit_tokens == made.restored


def test_never_stored_because_it_was_asked_so(bench: Make) -> None:
    made = bench()
    made.ask([system(), user()], store=False)
    check_unstored(made, "store=False", len(ids(made.model, [system(), user()])))


def test_never_stored_because_it_is_too_large(small: Callable[[int], Bench]) -> None:
    made = small(1024)
    long = [system(SYSTEM * 7), user()]
    made.ask(long)
    check_unstored(made, "larger than the store takes", len(ids(made.model, long)), long)


def test_never_stored_because_it_was_cancelled(bench: Make) -> None:
    made = bench()
    long = [system(SYSTEM * 30), user()]
    events = made.engine.generate(Request(messages=long, max_tokens=4))
    for event in events:
        if isinstance(event, Progress) and event.done >= 512:
            break
    events.close()  # type: ignore[attr-defined]
    settle(made.engine)
    found = check_unstored(made, "cancelled", len(ids(made.model, long)), long)
    assert found.hit_tokens >= 512


def check_unstored(
    made: Bench, why: str, whole: int, messages: Sequence[Any] = (system(), user())
) -> Explanation:
    before = made.would(messages)
    found = made.why(made.ask(messages, store=True))
    for one in (before, found):
        if one.code == "tokens_gone":  # it could not be stored this time either
            continue
        assert one.code == "not_stored"
        assert f"Request 1 began with the same {whole} tokens" in one.diagnosis
        assert why in one.diagnosis
        assert one.saving_tokens == whole - one.hit_tokens
    return before


def test_nothing_to_explain(bench: Make) -> None:
    made = bench()
    first = made.why(made.ask([system(), user()]))
    assert (first.code, first.hit_tokens, first.differing_token) == ("empty_store", 0, None)
    again = made.why(made.ask([system(), user()]))
    assert (again.code, again.hit_tokens) == ("hit", again.prompt_tokens)
    assert made.would([system(), user()]).code == "hit"


def test_a_request_whose_tokens_are_gone(bench: Make) -> None:
    made = bench()
    made.ask([system(), user()])
    request = made.ask([system(), user("Another question?")])
    made.store.evict(to_bytes=0)
    found = made.why(request)
    assert found.code == "tokens_gone"
    assert "parted from what was stored" in found.diagnosis
    assert found.where == "message 2 (user)"
    assert found.hit_tokens == made.restored
