"""The parts of the remote tier on their own: when a remote is asked, for what, and what it gets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvdb
from kvdb.clock import Environment
from kvdb.match import Match, Namespace
from kvdb.remotes.breaker import Breaker
from kvdb.remotes.configs import RemoteSpec, new_spec, save_spec
from kvdb.remotes.crew import Crew
from kvdb.remotes.economics import STALE_SECONDS, Rates, worth_loading
from kvdb.remotes.folder import FolderRemote
from kvdb.remotes.found import Found, ObjectName, probes
from kvdb.remotes.peer import ABSENT_SECONDS
from kvdb.remotes.peer import Clock as TierClock
from kvdb.remotes.remote import Put, PutState, RemoteRefused, RemoteUnreachable
from kvdb.remotes.tier import Tier, attach
from kvdb.store import Store
from tests.support import BLOCK, MIXED, PLAIN, open_namespace, put_all, random_tokens


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched(FolderRemote):
    """A folder that tells what it was asked; ``broken`` while nothing answers."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[int] = []
        self.broken = False

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        self.asked.append(len(keys))
        if self.broken:
            raise RemoteUnreachable("Nothing answers.")
        return super().exists_many(keys)

    def put_many(self, puts: Sequence[Put]) -> list[PutState]:
        if self.broken:
            raise RemoteUnreachable("Nothing answers.")
        return super().put_many(puts)


@pytest.fixture
def team(tmp_path: Path) -> Path:
    folder = tmp_path / "team"
    folder.mkdir()
    return folder


def spec_of(team: Path, **options: Any) -> RemoteSpec:
    return new_spec(options.pop("name", "team"), team.as_uri(), budget_ms=5000, **options)


def found(tier: Tier, match: Match) -> Found:
    question = tier.ask(match)
    assert question is not None
    for _, future in question._asked:
        future.exception(10)
    assert question.done()
    return question.result()


# -- when ----------------------------------------------------------------------------------------


def test_a_breaker_waits_longer_each_time_and_lets_one_try() -> None:
    clock = Clock()
    breaker = Breaker(clock, lambda: 0.4)
    assert breaker.allows()
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        breaker.failed()
        assert breaker.down_seconds == pytest.approx(seconds * 1.1)
        assert not breaker.allows(5)
        clock.now += seconds * 1.1
        assert breaker.allows(5)
        assert not breaker.allows(5)  # one is trying
    clock.now += 5.1  # that one never came back
    assert breaker.allows(5)
    breaker.succeeded()
    assert breaker.allows()
    assert breaker.allows()
    for late in range(3):
        assert (breaker.down_seconds > 0) is (late > 2)
        breaker.late()
    assert breaker.down_seconds > 0


def test_loading_is_weighed_against_computing() -> None:
    clock = Clock()
    rates = Rates(clock)
    assert rates.load_ms(1 << 20) is None
    rates.answered(0.010)
    rates.moved(10 << 20, 1.010)
    assert rates.load_ms(10 << 20) == pytest.approx(1010)
    rates.moved(1000, 5.0)  # so little measures the way there only
    assert rates.load_ms(10 << 20) == pytest.approx(1010)
    assert rates.worth_asking(11)
    assert not rates.worth_asking(9)  # it would be computed by then
    assert worth_loading(1010, 2000, 500)
    assert not worth_loading(1010, 1000, 500)
    assert worth_loading(None, 1, 500)
    # Where everything hits nothing is computed, so the model's speed would never be known.
    assert worth_loading(100, None, 500)
    assert not worth_loading(1010, None, 500)
    assert worth_loading(1010, None, 100_000)
    clock.now += STALE_SECONDS + 1
    assert rates.load_ms(1) is None  # and so it is measured again
    assert rates.worth_asking(9)


def test_calls_that_hang_take_no_more_than_their_threads() -> None:
    crew, release, begun = Crew("kvdb-test", 2), threading.Event(), threading.Semaphore(0)
    before = threading.active_count()

    def hang() -> bool:
        begun.release()
        return release.wait(30)

    hung = [crew.submit(hang) for _ in range(10)]
    assert begun.acquire(timeout=10)
    assert begun.acquire(timeout=10)
    assert threading.active_count() <= before + 2
    crew.close()
    assert all(future.cancelled() for future in hung[2:])
    release.set()
    assert [future.result(5) for future in hung[:2]] == [True, True]


# -- what is asked -------------------------------------------------------------------------------


def test_few_keys_tell_that_nothing_is_there() -> None:
    assert probes(1) == [0]
    assert probes(4) == [0, 1, 3]
    assert probes(512) == [0, 1, 3, 7, 15, 31, 63, 127, 255, 511]


@pytest.mark.parametrize("there", [0, 5, 12])
def test_what_is_there_is_found_and_remembered(tmp_path: Path, team: Path, there: int) -> None:
    tokens = random_tokens(1, 12 * BLOCK)
    with kvdb.open(tmp_path / "a") as a:
        a.remotes = attach(a, [spec_of(team)])
        namespace = open_namespace(a, MIXED)
        if there:
            put_all(a, namespace, tokens[: there * BLOCK])
            hashes = a.match(namespace, tokens).hashes[:there]
            a.remotes.stored(hashes)
            assert a.remotes.flush(10)
    clock = Clock()
    remote = Watched(team)
    with kvdb.open(tmp_path / "b") as b:
        time = TierClock(Environment(seconds=clock))
        b.remotes = Tier(b, [(spec_of(team), lambda: remote)], clock=time)
        match = b.match(open_namespace(b, MIXED), tokens)
        answer = found(b.remotes, match)
        bodies = sorted(name.block for name in answer.sources if name.part is None)
        assert bodies == list(range(there))
        assert answer.answer == ("found" if there else "absent")
        assert len(remote.asked) == (2 if there else 1)
        assert remote.asked[0] == len(probes(12))
        extended = match.extended(answer.elsewhere())
        assert extended.token_count == there * BLOCK
        assert extended.live_prefix_tokens == there * BLOCK
        assert extended.tip_id is None
        assert (extended.logits is not None) is (there == 12)
        # Asked again at once nothing leaves this machine; absence is believed for some seconds.
        question = b.remotes.ask(match)
        assert question is not None
        assert question.done()
        assert question.result().sources.keys() == answer.sources.keys()
        assert len(remote.asked) <= 2
        clock.now += ABSENT_SECONDS + 1
        found(b.remotes, match)
        assert len(remote.asked) > (2 if there else 1)


def test_holes_and_missing_states_are_asked_for(tmp_path: Path, team: Path) -> None:
    tokens = random_tokens(1, 4 * BLOCK)
    with kvdb.open(tmp_path / "a") as a:
        a.remotes = attach(a, [spec_of(team)])
        namespace = open_namespace(a, MIXED)
        put_all(a, namespace, tokens)
        match = a.match(namespace, tokens)
        a.remotes.stored(match.hashes)
        assert a.remotes.flush(10)
        a.sequence(namespace, match.tip_hash, name="kept")
        with a.database.write() as connection:
            gone = match.blocks[1].id
            connection.execute("DELETE FROM parts WHERE block_id = ?", (gone,))
            connection.execute("UPDATE blocks SET state = 'evicted' WHERE id = ?", (gone,))
            connection.execute(
                "DELETE FROM parts WHERE block_id = ? AND part LIKE 'state%'", (match.blocks[3].id,)
            )
        match = a.match(namespace, tokens)
        assert match.holes == (1,)
        answer = found(a.remotes, match)
        states = MIXED.states
        assert {name for name in answer.sources if name.block == 1} >= {ObjectName(1, None)}
        assert {name for name in answer.sources if name.block == 3} >= {
            ObjectName(3, state) for state in states
        }
        extended = match.extended(answer.elsewhere())
        assert extended.holes == ()
        assert extended.blocks[3].id > 0 > extended.blocks[1].id
        assert all(extended.blocks[3].parts[state].is_remote for state in states)
        assert extended.tip_id == match.tip_id


def test_a_block_comes_from_the_fastest_that_has_it(tmp_path: Path) -> None:
    tokens = random_tokens(1, 4 * BLOCK)
    folders = {name: tmp_path / name for name in ("near", "far", "dead")}
    for folder in folders.values():
        folder.mkdir()
    with kvdb.open(tmp_path / "a") as a:
        a.remotes = attach(a, [spec_of(folders["far"], name="far")])
        namespace = open_namespace(a, PLAIN)
        put_all(a, namespace, tokens)
        hashes = a.match(namespace, tokens).hashes
        a.remotes.stored(hashes)
        assert a.remotes.flush(10)
        near = attach(a, [spec_of(folders["near"], name="near")])
        near.stored(hashes[:2])
        assert near.flush(10)
        near.close()
    dead = Watched(folders["dead"])
    dead.broken = True
    with kvdb.open(tmp_path / "b") as b:
        remotes = [
            (spec_of(folders[name], name=name), lambda name=name: Watched(folders[name]))
            for name in ("far", "near")
        ]
        b.remotes = tier = Tier(
            b, [(spec_of(folders["dead"], name="dead"), lambda: dead), *remotes]
        )
        for name, bandwidth in (("far", 1e6), ("near", 1e9)):
            tier.peer(name).rates.answered(0.001)
            tier.peer(name).rates.moved(1 << 20, (1 << 20) / bandwidth)
        answer = found(tier, b.match(open_namespace(b, PLAIN), tokens))
        best = [answer.best(ObjectName(block, None))[0].name for block in range(4)]
        assert best == ["near", "near", "far", "far"]
        assert tier.peer("dead").counters.totals["failed"] == 1
        assert not tier.peer("dead").breakers["ask"].allows()


def test_what_goes_well_in_one_way_forgives_nothing_in_another(tmp_path: Path, team: Path) -> None:
    remote, clock = Watched(team), Clock()
    with kvdb.open(tmp_path / "a") as a:
        spec = save_spec(a, spec_of(team))
        time = TierClock(Environment(seconds=clock), lambda: 0.0)
        a.remotes = tier = Tier(a, [(spec, lambda: remote)], clock=time)
        peer, match = tier.peer("team"), a.match(open_namespace(a, PLAIN), random_tokens(1, BLOCK))
        for seconds in (1, 2, 4):  # objects never come, questions are answered
            peer.went_wrong("get", RemoteUnreachable("It hangs."))
            assert peer.down_seconds("get") == seconds
            assert found(tier, match).answer == "down"
            clock.now += seconds
            assert found(tier, match).answer == "absent"
            clock.now += ABSENT_SECONDS + 1
        peer.breakers["get"].succeeded()
        peer.went_wrong("put", RemoteRefused("Only reading is allowed."))
        assert peer.down_seconds("ask", "put") > 0
        assert found(tier, match).answer == "absent"
        tier.close()
        failed = peer.counters.totals["failed"]
        peer.went_wrong("get", RemoteUnreachable("It was closed."))
        assert peer.counters.totals["failed"] == failed  # by us


def test_a_description_that_found_no_room_is_put_later(tmp_path: Path, team: Path) -> None:
    states: list[PutState] = ["full", "stored"]

    class Full(Watched):
        def put_many(self, puts: Sequence[Put]) -> list[PutState]:
            return [states.pop(0)]

    with kvdb.open(tmp_path / "a") as a:
        remote = Full(team)
        a.remotes = Tier(a, [(spec_of(team), lambda: remote)])
        peer, record = a.remotes.peer("team"), a.describe(open_namespace(a, PLAIN))
        for _ in range(3):
            peer.describe(record)
        assert not states
        # One that is there already is not put, and so forgives nothing.
        peer.went_wrong("put", RemoteRefused("Only reading is allowed."))
        peer.describe(record)
        assert peer.down_seconds("put") > 0


# -- what is given -------------------------------------------------------------------------------


def store_some(store: Store, count: int, **options: Any) -> tuple[Namespace, list[bytes]]:
    namespace = open_namespace(store, MIXED, **options)
    tokens = random_tokens(2, count * BLOCK)
    put_all(store, namespace, tokens)
    return namespace, list(store.match(namespace, tokens).hashes)


def test_what_is_stored_is_shared_behind_it(tmp_path: Path, team: Path) -> None:
    with kvdb.open(tmp_path / "a") as a:
        save_spec(a, spec_of(team))
    with kvdb.open(tmp_path / "a", remotes=True) as a:
        _, hashes = store_some(a, 3)
        assert a.remotes is not None
        assert a.remotes.flush(10)
        names = {file.name for file in team.rglob("*") if file.is_file()}
        assert "namespace.json" in names
        assert {f"{i:06x}-{hash_.hex()}" for i, hash_ in enumerate(hashes)} <= names
        assert any(".logits" in name for name in names)
        assert any(".state" in name for name in names)
        put = a.remotes.peer("team").counters.totals["put"]
        assert put == len(names) - 1
        # What is there is not sent again.
        a.remotes.stored(hashes)
        assert a.remotes.flush(10)
        assert a.remotes.peer("team").counters.totals["put"] == put
    with kvdb.open(tmp_path / "a", read_only=True) as a:
        assert a.sql("SELECT put, put_bytes > 0, failed FROM remotes").rows == [(put, 1, 0)]


def test_a_tenants_own_namespace_is_shared_only_where_that_is_said(
    tmp_path: Path, team: Path
) -> None:
    for options, shared in (({}, False), ({"salted": "true"}, True)):
        path = tmp_path / str(shared)
        with kvdb.open(path) as a:
            save_spec(a, spec_of(team, options=options))
        with kvdb.open(path, remotes=True) as a:
            namespace = a.namespace(
                kvdb.ModelIdentity("w", "c"), MIXED, block_tokens=BLOCK, salt=b"tenant"
            )
            tokens = random_tokens(2, 2 * BLOCK)
            put_all(a, namespace, tokens)
            assert a.remotes is not None
            assert a.remotes.flush(10)
            assert (a.remotes.ask(a.match(namespace, tokens)) is not None) is shared
        assert any(team.rglob("*-*")) is shared


def test_a_queue_that_is_full_or_left_is_counted_and_never_waited_for(
    tmp_path: Path, team: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote = Watched(team)
    remote.broken = True
    with kvdb.open(tmp_path / "a") as a:
        spec = save_spec(a, spec_of(team))
        a.remotes = tier = Tier(a, [(spec, lambda: remote)], close_seconds=0.5)
        _, hashes = store_some(a, 3)
        tier.stored(hashes)
        assert not tier.flush(0.2)
        tier.stored([bytes([n % 256, n // 256]) * 16 for n in range(5000)])
        dropped = tier.peer("team").counters.totals["dropped"]
        assert 900 <= dropped <= 910
    assert "were not shared" in caplog.text
    with kvdb.open(tmp_path / "a", read_only=True) as a:
        ((total, error),) = a.sql("SELECT dropped, last_error FROM remotes").rows
        assert total >= 5000
        assert error == "Nothing answers."
