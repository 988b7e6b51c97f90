"""The writer's queue: a small write is committed after the puts that were queued before it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvdb.identity import as_tokens
from kvdb.writer import Payload, PutJob, Task, Ticket, Writer


def job(nbytes: int) -> PutJob:
    payload = Payload(0, {"kv:0": np.zeros(nbytes, np.uint8)})
    nothing: Any = None  # the queue looks at sizes only
    return PutJob(
        nothing, nothing, [], as_tokens([1]), (), (payload,), "prefill", False, None, None, None,
        Ticket(1),
    )  # fmt: skip


def test_a_record_follows_puts_larger_than_a_group() -> None:
    began, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def commit(jobs: Sequence[PutJob], tasks: Sequence[Task]) -> None:
        began.set()
        assert go_on.wait(10)
        order.extend("put" for _ in jobs)
        for task in tasks:
            task(None)  # type: ignore[arg-type]

    writer = Writer(commit, queue_bytes=1000, group_bytes=100, seconds=lambda: 0.0)
    writer.submit(job(90))
    assert began.wait(10)
    for _ in range(3):
        writer.submit(job(90))
    writer.submit_task(lambda _: order.append("record"), lambda: order.append("parts"))
    writer.submit(job(90))
    go_on.set()
    writer.close()
    assert order == ["put", "put", "put", "parts", "put", "record", "put"]


def test_a_record_that_cannot_be_prepared_costs_no_put(caplog: Any) -> None:
    stored: list[int] = []

    def commit(jobs: Sequence[PutJob], tasks: Sequence[Task]) -> None:
        stored.append(len(jobs))
        assert len(tasks) <= 1

    def fail() -> None:
        raise RuntimeError("a defect")

    writer = Writer(commit, queue_bytes=1000, group_bytes=1000, seconds=lambda: 0.0)
    ticket = job(10)
    writer.submit(ticket)
    writer.submit_task(lambda _: None, fail)
    writer.close()
    assert sum(stored) == 1
    assert ticket.ticket.reason is None
    assert "a record lacks its parts" in caplog.text
