"""Helpers for tests with several requests at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from tiny_model import prompt_tokens

from engine import End, Engine, Event, Load, Request, Token
from engine.turns import Cancelled
from kvdb.store import Store


def ask_all(engine: Engine, requests: Sequence[Request]) -> list[list[Event]]:
    """All events of requests that arrive together."""
    streams: list[Any] = []
    # On the engine's thread, so that all are there before its next step.
    engine.call(lambda worker: streams.extend(engine.generate(r) for r in requests))
    return [list(stream) for stream in streams]


def requests_of(lengths: Sequence[int], **options: Any) -> list[Request]:
    """Requests with unlike prompts of these lengths, which only ``max_tokens`` ends."""
    return [
        Request(tokens=prompt_tokens(length, seed=number), ignore_eos=True, **options)
        for number, length in enumerate(lengths)
    ]


def ids(events: Sequence[Event], index: int = 0) -> list[int]:
    """The tokens of one answer."""
    return [e.id for e in events if isinstance(e, Token) and e.index == index]


def ends(events: Sequence[Event]) -> list[End]:
    return [e for e in events if isinstance(e, End)]


def forwarded(worker: Any) -> int:
    """Tokens that went through the model, counted there."""
    return int(worker.model.forwarded)


def watch(engine: Engine, see: Callable[[Any], None]) -> None:
    """Have ``see`` called with the raw logits of every token that is chosen."""
    engine.call(lambda worker: setattr(worker, "observe", see))


def flush(engine: Engine) -> None:
    """Wait until all that was computed is stored."""
    engine.call(lambda worker: worker.storage.store.flush(30))


def settle(engine: Engine) -> None:
    """Wait until the engine has noticed that its clients are gone, and what it kept is stored."""
    engine.call(lambda worker: None)  # behind the turn that is running
    while engine.load() != Load():
        engine.call(lambda worker: None)
    flush(engine)


def held(store: Store) -> int:
    """Sequences of running requests: none, once all have ended."""
    return int(store.sql("SELECT count(*) FROM sequences").rows[0][0])


def cancel_when(coroutine: Generator[Any, Any, None], due: Callable[[], bool]) -> None:
    """Run a request's coroutine, as the scheduler would, up to a step after which it is
    cancelled."""
    while not due():
        next(coroutine)
    item = coroutine.throw(Cancelled("cancelled"))
    while not isinstance(item, End):
        item = next(coroutine)
