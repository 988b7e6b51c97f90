"""Faults that users of other engines reported, each as a small case of its kind, and the list of
where the other kinds are tested: docs/field_faults.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from many import ends, flush, ids
from tiny_model import prompt_tokens, run

from engine import Event, Request, Sampling, Token
from kvdb.store import Store

ROOT = Path(__file__).parents[2]
LIST = ROOT / "docs/field_faults.md"
PROMPT = tuple(prompt_tokens(150))
PLAIN = Request(tokens=PROMPT, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("shared", [64, 100, 127, 200])
def test_divergence_is_a_full_miss(tiny: Path, store: Store, make_engine: Any, shared: int) -> None:
    """A+B, then A+C: all of A is restored, to the token."""
    engine = make_engine(store, tiny, block_tokens=64)
    common = prompt_tokens(shared, seed=1)
    run(engine, [*common, 1, *prompt_tokens(150, seed=2)])
    warm = run(engine, [*common, 2, *prompt_tokens(150, seed=3)])
    assert warm.stats.restored_tokens == shared


def test_granularity_too_coarse(tiny: Path, store: Store, make_engine: Any) -> None:
    """300 tokens are no whole number of blocks of the default size."""
    engine = make_engine(store, tiny)
    tokens = prompt_tokens(300)
    run(engine, tokens)
    assert run(engine, tokens).stats.restored_tokens == 300
    assert run(engine, [*tokens[:280], 1, 2]).stats.restored_tokens == 280


Seen = Sequence[Event]
# Of each control: the request that has it, and its effect against the plain one, from outside.
CONTROLS: dict[str, tuple[Callable[[Request], Request], Callable[[Seen, Seen, Store], bool]]] = {
    "max_tokens": (
        lambda r: replace(r, max_tokens=2),
        lambda plain, seen, store: ids(seen) == ids(plain)[:2],
    ),
    "stop_tokens": (
        lambda r: replace(r, stop_tokens=tuple(range(128))),
        lambda plain, seen, store: ends(seen)[0].reason == "stop" and len(ids(seen)) == 1,
    ),
    "sampling": (
        lambda r: replace(r, sampling=Sampling(temperature=2.0, seed=3)),
        lambda plain, seen, store: ids(seen) != ids(plain),
    ),
    "logprobs": (
        lambda r: replace(r, logprobs=3),
        lambda plain, seen, store: all(
            len(e.top_logprobs) == 3 for e in seen if isinstance(e, Token)
        ),
    ),
    "reuse": (
        lambda r: replace(r, reuse="exact"),
        lambda plain, seen, store: ends(seen)[0].stats.miss_reason == "inexact",
    ),
    "read": (
        lambda r: replace(r, read=False),
        lambda plain, seen, store: ends(seen)[0].stats.restored_tokens == 0,
    ),
    "store": (
        lambda r: replace(r, store=False, tokens=PROMPT[::-1]),
        lambda plain, seen, store: (
            store.sql("SELECT unstored FROM requests WHERE id = 2").rows == [("store_off",)]
            and store.sql("SELECT count(*) FROM blocks WHERE depth = 0").rows == [(1,)]
        ),
    ),
    "salt": (
        lambda r: replace(r, salt=b"s"),
        lambda plain, seen, store: ends(seen)[0].stats.restored_tokens == 0,
    ),
    "ttl_seconds": (
        lambda r: replace(r, ttl_seconds=60.0),
        lambda plain, seen, store: ends(seen)[0].stats.held,
    ),
    "tenant": (
        lambda r: replace(r, tenant="t"),
        lambda plain, seen, store: store.sql("SELECT tenant FROM requests").rows[1] == ("t",),
    ),
    "client": (
        lambda r: replace(r, client="c"),
        lambda plain, seen, store: store.sql("SELECT client FROM requests").rows[1] == ("c",),
    ),
    "deadline_ms": (
        lambda r: replace(r, deadline_ms=1e-3),
        lambda plain, seen, store: ends(seen)[0].reason == "deadline",
    ),
    "n": (
        lambda r: replace(r, n=2),
        lambda plain, seen, store: len(ends(seen)) == 2,
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_control_ignored(tiny: Path, store: Store, make_engine: Any, name: str) -> None:
    """Each has an effect that is seen from outside."""
    change, effect = CONTROLS[name]
    engine = make_engine(store, tiny, block_tokens=64)
    plain = list(engine.generate(PLAIN))
    flush(engine)
    seen = list(engine.generate(change(PLAIN)))
    flush(engine)
    assert effect(plain, seen, store)


def test_the_list_of_kinds_names_tests_that_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", LIST.read_text())
    assert len(named) > 25
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
