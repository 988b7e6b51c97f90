"""Push and pull between stores through a real folder: everything, once, and only what is good."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvdb
from kvdb.errors import StoreMissing, UsageError
from kvdb.layout import Layout
from kvdb.remotes import push, windows
from kvdb.remotes.report import PullReport
from kvdb.snapshot import staging
from kvdb.store import Store
from tests.snapshots.world import blocks, fill
from tests.support import (
    LOGITS,
    check_prefix,
    kv_layer,
    open_namespace,
    payloads,
    put_all,
    random_tokens,
)

CONTENT = (
    "SELECT lower(hex(b.hash)), b.depth, b.exact, u.digest, p.part, lower(hex(p.checksum)) "
    "FROM blocks AS b JOIN parts AS p ON p.block_id = b.id "
    "LEFT JOIN builds AS u ON u.id = b.build_id WHERE b.state = 'live' ORDER BY b.hash, p.part"
)
# Two chains of seven blocks; the MIXED one has logits and a recurrent state on its last block.
BLOCKS, OBJECTS = 14, 14 + 1 + 2


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store ``a`` with two chains, and a folder ``nas`` that it was pushed into; closed."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "nas").mkdir()
    with kvdb.open(folder / "a", min_free_bytes=0) as a:
        fill(a)
        a.push((folder / "nas").as_uri())
    return folder


@pytest.fixture
def there(tmp_path: Path, template: Path) -> Path:
    """The remote's folder, with all that ``team`` has."""
    return shutil.copytree(template / "nas", tmp_path / "nas")


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A remote's folder with nothing in it."""
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


@pytest.fixture
def team(tmp_path: Path, template: Path, there: Path) -> Iterator[Store]:
    """A store with two chains, and the remote ``team``."""
    with kvdb.open(shutil.copytree(template / "a", tmp_path / "a")) as a:
        a.add_remote("team", there.as_uri())
        yield a


@pytest.fixture
def b(tmp_path: Path, there: Path) -> Iterator[Store]:
    """Another machine's store."""
    with kvdb.open(tmp_path / "b", min_free_bytes=0) as opened:
        yield opened


def content(store: Store) -> list[tuple[Any, ...]]:
    return store.sql(CONTENT, limit=10_000).rows


def objects(there: Path, depth: int | None = None, suffix: str = "") -> list[Path]:
    """Files of the remote: all blocks', or those of one depth and part."""
    found = (path for path in there.rglob("*") if path.is_file() and "-" in path.name)
    if depth is None:
        return sorted(found)
    start = f"{depth:06x}-"
    return sorted(p for p in found if p.name.startswith(start) and p.suffix == suffix)


def test_what_one_has_the_other_gets(
    team: Store, b: Store, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "WINDOW_OBJECTS", 4)
    monkeypatch.setattr(push, "PUT_OBJECTS", 3)
    monkeypatch.setattr(push, "ASK_BLOCKS", 5)
    url = empty.as_uri()
    namespace = open_namespace(team)
    build = team.build(namespace, "sha-of-a-build", {"device": "cpu"})
    tokens = random_tokens(0, 130)  # shares its first 100 with what fill() stored
    exact = random_tokens(7, 40)
    put = team.put(
        namespace, exact, payloads(namespace, exact), exact=True, build_id=build.id
    ).wait(30)
    assert put.dropped == 0

    dry = team.push(url, dry_run=True)
    assert (dry.blocks, dry.stored) == (BLOCKS + 3, OBJECTS + 4)
    assert not objects(empty)
    pushed = team.push(url)
    assert (pushed.blocks, pushed.stored, pushed.stopped) == (BLOCKS + 3, OBJECTS + 4, "")
    again = team.push(url)
    assert (again.stored, again.present) == (0, OBJECTS + 4)

    dry_pull = b.pull(url, dry_run=True)
    assert (dry_pull.blocks, dry_pull.stored) == (BLOCKS + 3, BLOCKS + 3)
    assert content(b) == []
    pulled = b.pull(url)
    assert (pulled.blocks, pulled.new, pulled.stored) == (BLOCKS + 3, BLOCKS + 3, BLOCKS + 3)
    assert (pulled.got, pulled.rejected, pulled.stopped) == (OBJECTS + 4, 0, "")
    assert content(b) == content(team)
    assert b.sql("SELECT DISTINCT origin FROM blocks").rows == [("import",)]
    for space in b.namespaces():
        for seed, length in ((0, 100), (1, 100), (7, 40)):
            check_prefix(b, space, random_tokens(seed, length))  # what it reads is true
    assert check_prefix(b, open_namespace(b), tokens[:100]) == 100
    assert check_prefix(b, open_namespace(b), exact) == 40
    assert b.verify(data=True).ok

    again_pulled = b.pull(url)
    assert (again_pulled.new, again_pulled.present, again_pulled.got) == (0, BLOCKS + 3, 0)


def test_sync_brings_both_to_the_same(team: Store, b: Store, there: Path) -> None:
    namespace = open_namespace(b, weights="other")
    put_all(b, namespace, random_tokens(3, 50))
    b.add_remote("team", there.as_uri())
    b.sync("team")
    both = team.sync("team")
    assert both.push is not None
    assert both.pull is not None
    assert both.pull.stored == 4
    b.sync("team")
    assert content(team) == content(b)
    assert len(team.sync("team").pull.namespaces) == 3  # type: ignore[union-attr]


def test_parts_that_come_later_are_fetched_alone(team: Store, b: Store, there: Path) -> None:
    namespace = open_namespace(team, weights="later")
    tokens = random_tokens(5, 32)
    team.put(namespace, tokens, payloads(namespace, tokens, optional=False)).wait(30)
    team.push("team")
    b.pull(there.as_uri())
    team.put(namespace, tokens, payloads(namespace, tokens)).wait(30)
    assert team.push("team").stored == 1
    pulled = b.pull(there.as_uri())
    assert (pulled.new, pulled.stored, pulled.got) == (1, 1, 1)
    assert content(b) == content(team)


def test_what_is_chosen_goes_with_all_it_stands_on(team: Store, b: Store, there: Path) -> None:
    assert team.push("team", sequences=["agent 0"]).blocks == 7
    assert team.push("team", where="depth <= 2 AND model = 'w'").blocks == 6
    assert team.push("team", max_bytes=96 << 10).blocks < BLOCKS
    spaces = {space.fingerprint.hex(): space for space in team.namespaces()}
    team.push("team")
    first = min(spaces)
    assert b.pull(there.as_uri(), model=first[:12]).stored == 7
    assert b.pull(there.as_uri(), model="w").stored == 7
    with pytest.raises(StoreMissing):
        b.pull(there.as_uri(), model="nobody")
    with pytest.raises(StoreMissing):
        team.push("team", model="nobody")


def test_tenants_own_state_stays_unless_it_is_to_be_shared(
    team: Store, b: Store, there: Path
) -> None:
    put_all(team, open_namespace(team, salt=b"tenant"), random_tokens(9, 40))
    pushed = team.push("team")
    assert (pushed.blocks, pushed.salted) == (BLOCKS, 1)
    team.add_remote("all", there.as_uri(), options={"salted": "true"})
    assert team.push("all").blocks == BLOCKS + 3
    pulled = b.pull(there.as_uri())
    assert (pulled.stored, pulled.salted) == (BLOCKS, 1)


def test_foreign_objects_are_passed_over(team: Store, b: Store, there: Path) -> None:
    good = objects(there)[0]
    good.with_name(good.name + ".state_7").write_bytes(b"x")  # no part of this layout
    for name in ("readme.txt", "v1/ab/cd/other-thing", "v2/x/y"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(b"\0" * 100)
    pulled = b.pull(there.as_uri())
    assert (pulled.stored, pulled.rejected) == (BLOCKS, 0)
    assert pulled.foreign == 2
    assert content(b) == content(team)


def pull_bad(b: Store, there: Path, bad: Path) -> PullReport:
    """Pull from a remote with one bad object; it is named, and all that is good is right."""
    pulled = b.pull(there.as_uri())
    assert pulled.rejected == 1
    assert list(pulled.named) == [f"v1/{bad.parent.parent.name}/{bad.name}"]
    assert b.verify(data=True).ok
    for space in b.namespaces():
        for seed in (0, 1):
            check_prefix(b, space, random_tokens(seed, 100))
    return pulled


@pytest.mark.parametrize("how", ["truncated", "flipped", "swapped", "long", "deeper"])
def test_a_bad_object_costs_what_stands_on_it(how: str, team: Store, b: Store, there: Path) -> None:
    bad = objects(there, 3)[0]
    data = bytearray(bad.read_bytes())
    if how == "flipped":
        data[-5] ^= 1
    elif how == "swapped":  # another block of the same namespace
        data = bytearray(
            next(p for p in objects(there, 2) if p.parent.parent == bad.parent.parent).read_bytes()
        )
    bad.write_bytes({"truncated": data[:-1], "long": data + b"\0" * (4 << 20)}.get(how, data))
    if how == "deeper":
        bad = bad.rename(bad.with_name(bad.name.replace("000003", "000009")))
    pulled = pull_bad(b, there, bad)
    assert (pulled.stored, pulled.left) == (3 + 7, {"parent_missing": 3})

    # Who has it good replaces it, when asked to look.
    healed = team.push("team", verify=True)
    if how == "deeper":
        assert (healed.stored, healed.replaced, healed.rejected) == (1, 0, 0)
        bad.unlink()
    else:
        assert (healed.stored, healed.replaced, healed.rejected) == (1, 1, 1)
    assert b.pull(there.as_uri()).stored == 4
    assert content(b) == content(team)


def test_a_bad_part_costs_only_itself(team: Store, b: Store, there: Path) -> None:
    bad = objects(there, 6, ".logits")[0]
    bad.write_bytes(bad.read_bytes()[:-3])
    assert pull_bad(b, there, bad).stored == BLOCKS


def test_a_bad_description_costs_its_namespace(team: Store, b: Store, there: Path) -> None:
    described = sorted(there.rglob("namespace.json"))
    described[0].write_bytes(described[1].read_bytes())
    pulled = b.pull(there.as_uri())
    assert (pulled.stored, pulled.rejected) == (7, 1)
    assert team.push("team").replaced == 1
    assert b.pull(there.as_uri()).stored == 7


def test_a_missing_parent(team: Store, b: Store, there: Path) -> None:
    objects(there, 2)[0].unlink()
    pulled = b.pull(there.as_uri())
    assert (pulled.stored, pulled.left) == (2 + 7, {"parent_missing": 4})
    team.push("team")
    assert b.pull(there.as_uri()).stored == 5


def test_a_remote_that_is_not_written_or_read(team: Store, there: Path) -> None:
    team.add_remote("in", there.as_uri(), writes=False)
    team.add_remote("out", there.as_uri(), reads=False)
    with pytest.raises(UsageError):
        team.push("in")
    with pytest.raises(UsageError):
        team.pull("out")
    assert team.sync("in").push is None
    assert team.sync("out").pull is None


def test_a_full_store_keeps_what_it_has(
    store: Store, tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "RUN_BYTES", 1 << 20)

    def chain(into: Store, weights: str, blocks: int) -> None:
        """Blocks of 256 KiB."""
        layout = Layout((kv_layer(dim=64), kv_layer(dim=64)), LOGITS)
        namespace = open_namespace(into, layout, weights=weights, block_tokens=128)
        put_all(into, namespace, random_tokens(1, 128 * blocks))

    chain(store, "theirs", 30)
    store.push(empty.as_uri())
    with kvdb.open(tmp_path / "small", max_bytes=16 << 20, min_free_bytes=0) as small:
        chain(small, "mine", 30)
        pulled = small.pull(empty.as_uri())
        assert "max_bytes is too small" in pulled.stopped
        assert pulled.left["no_room"] > 0
        assert len(blocks(small)) == 30 + pulled.stored
        assert small.verify(data=True).ok
        more = small.pull(empty.as_uri(), evict=True)
        assert (more.stored, more.stopped) == (30 - pulled.stored, "")
        assert small.verify(data=True).ok


def test_a_namespace_over_its_quota_leaves_others_their_room(
    team: Store, b: Store, there: Path
) -> None:
    first = min(space.fingerprint.hex() for space in team.namespaces())
    b.pull(there.as_uri(), model=first[:16])
    assert len({row[0] for row in content(b)}) == 7
    put_all(team, team.namespaces()[0], random_tokens(50, 60))
    put_all(team, team.namespaces()[1], random_tokens(50, 60))
    full = next(space for space in b.namespaces() if space.fingerprint.hex() == first)
    b.set_quota(1, namespace=full)
    team.push("team")
    pulled = b.pull(there.as_uri())
    assert (pulled.stored, pulled.left) == (7 + 4, {"no_room": 4})
    assert "quota" in pulled.stopped


def test_two_pulls_at_once_count_what_the_other_stored(
    tmp_path: Path, there: Path, b: Store
) -> None:
    done: list[PullReport] = []
    with kvdb.open(tmp_path / "b", min_free_bytes=0) as other:

        def once(at: int, _: int) -> None:
            if at and not done:
                done.append(other.pull(there.as_uri()))

        report = b.pull(there.as_uri(), progress=once)
    assert done[0].stored == BLOCKS
    assert (report.blocks, report.stored, report.present) == (BLOCKS, 0, BLOCKS)
    assert report.new == 0
    assert not report.left
