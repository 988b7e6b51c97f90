"""What a request's row says of its time and tokens is what happened."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tiny_model import prompt_tokens, run

from engine import Request, Token
from engine.events import End, Stats
from kvdb.store import Store

LONG = prompt_tokens(2000)
ROW = (
    "SELECT skip, prompt_tokens, matched_tokens, restored_tokens, ttft_ms, behind_ms, "
    "load_ms + warmup_ms + queued_ms + lookup_ms + restore_ms + prefill_ms + first_sample_ms, "
    "first_token_ms "
    "FROM hit_history ORDER BY id"
)


def timed(engine: Any, tokens: list[int], **options: Any) -> tuple[float, Stats]:
    """Milliseconds to the first token as a caller's clock has it, and what the engine says."""
    began = time.perf_counter()
    first = 0.0
    for event in engine.generate(Request(tokens=tokens, max_tokens=4, **options)):
        if isinstance(event, Token) and not first:
            first = (time.perf_counter() - began) * 1e3
    assert isinstance(event, End)
    return first, event.stats


def test_the_parts_of_the_time_to_the_first_token_add_up(
    tiny: Path, store: Store, make_engine: Any
) -> None:
    engine = make_engine(store, tiny, block_tokens=64)
    loading = run(engine, LONG[:100]).stats
    assert loading.load_ms > 0
    assert loading.warmup_ms > 0
    cases = {
        "none": LONG[200:1400],
        "full": LONG[200:1400],
        "partial": LONG[200:2000],
    }
    for skip, tokens in cases.items():
        took, stats = timed(engine, tokens)
        assert stats.skip == skip
        assert stats.load_ms == 0
        assert stats.ttft_ms is not None
        assert stats.first_token_ms is not None
        # Two clocks of the engine's: its parts, and the whole.
        assert abs(stats.ttft_ms - stats.first_token_ms) <= 5 + 0.05 * stats.first_token_ms
        # The caller's clock has the hand-over between threads too.
        assert stats.ttft_ms <= took <= stats.ttft_ms + 250
        assert (stats.behind_ms > 0) == (skip == "full")
        assert stats.behind_ms <= stats.restore_ms + stats.prefill_ms
    store.flush()
    rows = store.sql(ROW).rows
    first, *others = rows
    assert first[4] >= loading.load_ms + (loading.first_token_ms or 0)
    for row, tokens, matched in zip(others, cases.values(), (0, 1200, 1200), strict=True):
        skip, prompt, known, restored, ttft, behind, parts, first_token = row
        assert (prompt, known) == (len(tokens), matched)
        assert restored <= known
        assert abs(ttft - (parts - behind)) < 1e-6
        assert abs(ttft - first_token) <= 5 + 0.05 * first_token


def test_a_match_counts_whatever_is_then_restored(
    tiny: Path, store: Store, make_engine: Any
) -> None:
    engine = make_engine(store, tiny, block_tokens=64)
    run(engine, LONG[:640])
    with store.database.write() as connection:
        # Holes in the middle: known, and not there.
        connection.execute("DELETE FROM parts WHERE block_id IN (4, 5)")
        connection.execute("UPDATE blocks SET state = 'evicted' WHERE id IN (4, 5)")
    stats = run(engine, LONG[:640]).stats
    assert (stats.skip, stats.matched_tokens, stats.refilled_tokens) == ("refill", 640, 128)
    assert run(engine, LONG[:640], read=False).stats.matched_tokens == 0


def test_who_restored_nothing_saved_nothing(tiny: Path, store: Store, make_engine: Any) -> None:
    """Setting up caches is no restore: else such a namespace would have saved less than nothing."""
    engine = make_engine(store, tiny, block_tokens=64)
    for seed in (1, 2):
        run(engine, prompt_tokens(300, seed=seed))
    store.flush()
    assert store.sql("SELECT restored_tokens, seconds_saved FROM savings").rows == [(0, 0.0)]
