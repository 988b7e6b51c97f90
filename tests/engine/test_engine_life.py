"""Cancelling, closing, failing stores, unseen builds: a request always ends right."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from many import settle
from tiny_model import equal, prompt_tokens, run

import kvdb
from engine import Engine, EngineClosed, Progress, Request, Sampling, Token
from engine.events import End
from engine.storage import Storage
from kvdb.errors import OutOfSpace, StoreUnavailable
from kvdb.store import Store

LONG = prompt_tokens(2000)


def test_a_cancelled_prefill_keeps_its_work(tiny: Path, store: Store, make_engine: Any) -> None:
    engine = make_engine(store, tiny)
    events = engine.generate(Request(tokens=LONG, max_tokens=4))
    for event in events:
        if isinstance(event, Progress) and event.done >= 512:
            break
    events.close()
    settle(engine)
    again = run(engine, LONG)
    assert again.stats.restored_tokens >= 512
    assert equal(run(make_engine(None, tiny), LONG), again, "max")
    rows = store.sql(
        "SELECT prompt_tokens, restored_tokens, computed_tokens, generated_tokens FROM requests "
        "ORDER BY id"
    ).rows
    assert rows[0][1] == 0
    assert 512 <= rows[0][2] == rows[0][0] <= 2000
    assert rows[1][0] == 2000
    assert store.sql("SELECT count(*) FROM sequences").rows == [(0,)]


def test_a_cancelled_answer_keeps_its_state(tiny: Path, store: Store, make_engine: Any) -> None:
    engine = make_engine(store, tiny, block_tokens=16)
    prompt = prompt_tokens(40)
    # More than can be generated before the cancellation is seen.
    request = Request(tokens=prompt, max_tokens=3000, ignore_eos=True)
    events = engine.generate(request)
    ids = []
    for event in events:
        if isinstance(event, Token):
            ids.append(event.id)
        if len(ids) == 50:
            break
    events.close()
    settle(engine)
    assert run(engine, [*prompt, *ids[:49]]).stats.restored_tokens >= 40 + 48


def test_cancelled_requests_end_with_their_reason(
    tiny: Path, store: Store, make_engine: Any
) -> None:
    engine = make_engine(store, tiny)
    events = engine.generate(Request(tokens=[1, 2, 3], max_tokens=4000, ignore_eos=True))
    assert isinstance(next(e for e in events if isinstance(e, Token)), Token)
    closer = threading.Thread(target=engine.close)
    closer.start()
    last = list(events)[-1]
    closer.join()
    assert isinstance(last, End)
    assert last.reason == "cancelled"


def test_a_closed_engine_says_so(tiny: Path) -> None:
    engine = Engine(None, str(tiny))
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed):
        engine.generate(Request(tokens=[1]))
    with pytest.raises(EngineClosed):
        engine.call(lambda worker: None)


def test_sixteen_threads_get_their_own_answers(tiny: Path, store: Store, make_engine: Any) -> None:
    engine = make_engine(store, tiny, block_tokens=16)
    prompts = [prompt_tokens(30 + n, seed=n) for n in range(16)]
    serial = [run(engine, prompt, read=False, store=False).ids for prompt in prompts]
    answers: dict[int, list[int]] = {}

    def ask(n: int) -> None:
        request = Request(tokens=prompts[n], max_tokens=4, sampling=Sampling(seed=7))
        answers[n] = [e.id for e in engine.generate(request) if isinstance(e, Token)]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[n] for n in range(16)] == serial


class Failing(Storage):
    """A store of which one method fails."""

    def __init__(self, inner: Storage, method: str) -> None:
        class Broken:
            def __getattr__(self, name: str) -> Any:
                if name == method:
                    raise OutOfSpace("No space is left.")
                return getattr(inner.store, name)

        super().__init__(Broken(), inner.namespace, inner.build)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["lease", "read_parts", "read_part", "put", "record"])
def test_a_failing_store_fails_no_request(
    tiny: Path, store: Store, make_engine: Any, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    engine = make_engine(store, tiny, block_tokens=64)
    cold = run(make_engine(None, tiny), LONG[:300])
    run(engine, LONG[:300])

    def change(worker: Any) -> None:
        worker.storage = Failing(worker.storage, method)

    engine.call(change)
    with caplog.at_level(logging.WARNING, logger="kvdb.engine"):
        for prompt in (LONG[:300], LONG[:300], [*LONG[:300], 1]):
            again = run(engine, prompt)
            if len(prompt) == 300:
                assert equal(cold, again, "max")
    assert len(caplog.records) == 1
    assert "OutOfSpace" in caplog.text


def test_a_store_that_cannot_be_used_at_load_is_left_out(
    tiny: Path, store: Store, make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise StoreUnavailable("The folder is gone.")

    engine = make_engine(Gone(), tiny)
    assert run(engine, [1, 2, 3]).ids == run(make_engine(None, tiny), [1, 2, 3]).ids
    assert "going on without the store" in caplog.text


def test_a_vanished_folder_stops_no_request(
    tiny: Path, tmp_path: Path, make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = kvdb.open(tmp_path / "gone", min_free_bytes=0)
    engine = make_engine(store, tiny, block_tokens=64)
    first = run(engine, LONG[:300])
    shutil.rmtree(tmp_path / "gone" / "shards")
    assert equal(first, run(engine, LONG[:300]), "max")
    assert "not written" in caplog.text
    engine.close()
    store.close()


def test_a_read_only_store_is_read(
    tiny: Path, tmp_path: Path, make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with kvdb.open(tmp_path / "s", min_free_bytes=0) as store:
        engine = make_engine(store, tiny, block_tokens=64)
        first = run(engine, LONG[:300])
        engine.close()
    with kvdb.open(tmp_path / "s", create=False, read_only=True) as store:
        engine = make_engine(store, tiny, block_tokens=64)
        again = run(engine, LONG[:300])
        assert again.stats.skip == "full"
        assert equal(first, again, "max")
        assert run(engine, LONG[:400]).stats.restored_tokens >= 256
        other = make_engine(store, tiny, block_tokens=32)
        assert run(other, LONG[:300]).stats.restored_tokens == 0
        other.close()
        engine.close()
    said = [r.getMessage() for r in caplog.records if r.name == "kvdb.engine"]
    assert len(said) == 2  # each reason once, whatever the number of requests


def test_history_says_what_happened(tiny: Path, store: Store, make_engine: Any) -> None:
    engine = make_engine(store, tiny, block_tokens=64)
    run(engine, LONG[:300], tenant="t", client="c")
    run(engine, LONG[:300])
    run(engine, LONG[:350])
    rows = store.sql(
        "SELECT tenant, client, prompt_tokens, restored_tokens, computed_tokens, skip, "
        "miss_reason, load_ms > 0, deepest_block_id IS NULL FROM requests ORDER BY id"
    ).rows
    assert rows[0] == ("t", "c", 300, 0, 300, "none", "empty_store", 1, 1)
    assert rows[1] == ("", "", 300, 300, 0, "full", None, 0, 0)
    assert rows[2][2:6] == (350, 300, 50, "partial")


def test_decoding_keeps_whole_blocks_as_they_fill(
    tiny: Path, store: Store, make_engine: Any
) -> None:
    engine = make_engine(store, tiny, block_tokens=16)
    prompt = prompt_tokens(20)
    answer = run(engine, prompt, max_tokens=60, ignore_eos=True)
    every = [*prompt, *answer.ids]
    match = store.match(engine.call(lambda worker: worker.storage.namespace), every[:79])
    assert match.complete
    assert not match.holes
    rows = store.sql(
        "SELECT depth, token_count, origin FROM blocks ORDER BY depth, token_count"
    ).rows
    assert rows == [
        (0, 16, "prefill"),
        (1, 4, "prefill"),
        (1, 16, "decode"),
        (2, 16, "decode"),
        (3, 16, "decode"),
        (4, 15, "decode"),
    ]


def test_repeating_a_request_writes_nothing_new(tiny: Path, store: Store, make_engine: Any) -> None:
    engine = make_engine(store, tiny, block_tokens=64)
    for reuse in ("max", "exact"):
        run(engine, LONG[:300], reuse=reuse)
        before = store.sql("SELECT sum(nbytes), count(*) FROM shards").rows
        run(engine, LONG[:300], reuse=reuse)
        assert store.sql("SELECT sum(nbytes), count(*) FROM shards").rows == before


KILLED = """
import sys, kvdb
from engine import Engine, Progress, Request
store = kvdb.open(sys.argv[1], min_free_bytes=0)
engine = Engine(store, sys.argv[2])
for event in engine.generate(Request(tokens=eval(sys.argv[3]), max_tokens=4)):
    if isinstance(event, Progress) and event.done >= 1024:
        store.flush()
        print("now", flush=True)
"""


def test_a_prefill_killed_midway_is_reused_by_the_next_process(
    tiny: Path, tmp_path: Path, make_engine: Any
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "store"), str(tiny), repr(LONG)],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"now\n"
    child.kill()
    child.communicate()
    with kvdb.open(tmp_path / "store", min_free_bytes=0) as store:
        engine = make_engine(store, tiny)
        again = run(engine, LONG)
        assert again.stats.restored_tokens >= 1024
        assert equal(run(make_engine(None, tiny), LONG), again, "max")
        engine.close()


def test_importing_the_engine_imports_no_mlx() -> None:
    code = (
        "import sys, engine; sys.exit(any(m.split('.')[0] in ('mlx', 'mlx_lm') "
        "for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_program_that_forgets_to_close_ends_well(tiny: Path) -> None:
    code = (
        "import sys; from engine import Engine, Request\n"
        "engine = Engine(None, sys.argv[1])\n"
        "events = engine.generate(Request(tokens=[1, 2, 3], max_tokens=3000, ignore_eos=True))\n"
        "next(events), next(events)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny)], check=True, timeout=60)
