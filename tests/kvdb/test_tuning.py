"""What the history says about batches and RAM."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdb
from kvdb.clock import Environment
from kvdb.history import RequestRecord
from kvdb.opening import Options, open_store
from kvdb.tuning import DAY_US, advice, overlap, recent_tuning

SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 20)).map(lambda span: (span[0], sum(span))),
    min_size=1,
)


@given(SPANS)
def test_overlap_is_what_counting_moments_gives(spans: list[tuple[int, int]]) -> None:
    moments = [sum(first <= moment < last for first, last in spans) for moment in range(61)]
    busy = [count for count in moments if count]
    assert overlap(spans) == pytest.approx(sum(busy) / len(busy))


@pytest.mark.parametrize(
    ("apart_ms", "from_disk", "told"),
    [
        (100, 0, ["batch fill"]),  # one after the other
        (12.5, 0, []),  # eight at once
        (12.5, 6, []),
        (12.5, 7, ["disk reads"]),
    ],
)
def test_advice_is_given_where_there_is_something_to_gain(
    path: Path, apart_ms: float, from_disk: int, told: list[str]
) -> None:
    now = 10 * DAY_US
    with open_store(path, Options(), environment=Environment(now_us=lambda: now)) as store:
        for number in range(25):
            outdated = number >= 20  # these read from disk too, but the day before
            store.record(
                RequestRecord(
                    started_at=now - DAY_US * outdated - 10_000_000 + int(number * apart_ms * 1000),
                    namespace_id=None,
                    prompt_tokens=0,
                    restored_tokens=0,
                    refilled_tokens=0,
                    computed_tokens=0,
                    generated_tokens=9,
                    skip="none",
                    bytes_read=int(number < from_disk or outdated),
                    first_token_ms=5.0,
                    total_ms=105.0,
                    client="test",
                )
            )
        store.flush()
        tuning = recent_tuning(store)
        assert tuning.requests == 20
        found = advice(tuning, lambda model: 8, 1 << 30)
        assert [name for name, _, todo in found if todo] == told
        assert len(found) == 2


def test_few_requests_say_nothing(path: Path) -> None:
    with kvdb.open(path) as store:
        assert advice(recent_tuning(store), lambda model: 8, 0) == ()
