"""Which blocks an export takes, and in which order: closed over ancestors, chains together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvdb.errors import StoreMissing, UsageError
from kvdb.index import namespace_record
from kvdb.snapshot.manifest import BuildNote, Manifest, NamedTip, codec_notes

if TYPE_CHECKING:
    from kvdb.driver import Connection
    from kvdb.sandbox import SqlResult
    from kvdb.store import Store

# More than a member's header, tar header and padding take, beside 4 bytes a token.
MEMBER_OVERHEAD = 2560
PART_OVERHEAD = 512
MANIFEST_ROOM = 64 << 10
WHERE_SECONDS = 60.0
MAX_ROWS = 1 << 40
LIVE_BLOCKS = (
    "SELECT b.id, b.parent_id, b.namespace_id, b.hash, b.queue = 'hot', b.last_access, "
    "b.created_at, b.token_count, "
    "(SELECT sum(nbytes) FROM parts WHERE block_id = b.id), "
    "(SELECT sum(raw_nbytes) FROM parts WHERE block_id = b.id), "
    "(SELECT group_concat(codec) FROM parts WHERE block_id = b.id), b.build_id, "
    "(SELECT length(tokens) > 0 FROM block_tokens WHERE block_id = b.id), b.depth "
    "FROM blocks AS b WHERE b.state = 'live'"
)
NAMESPACES = (
    "SELECT id, fingerprint, model, length(salt) > 0 AND live_blocks > 0 "
    "FROM namespaces ORDER BY fingerprint"
)
NAMED = (
    "SELECT name, namespace_id, tip_id, expires_at FROM sequences "
    "WHERE name IS NOT NULL AND tip_id IS NOT NULL ORDER BY name"
)
BUILDS = "SELECT id, namespace_id, digest, description FROM builds ORDER BY digest"


@dataclass(frozen=True, slots=True)
class Selection:
    """What to take; all of the store without any. Conditions add up.

    ``where`` is an SQL condition on the view block_usage; ``ids`` are those of blocks; ``since_us``
    and ``base`` leave out what was stored before a time (Unix µs) and what another snapshot holds;
    ``max_bytes`` bounds the snapshot, which then holds the hottest blocks. Ancestors come along,
    but for those left out by ``since_us`` and ``base``. Without ``salted`` the namespaces of
    tenants of their own stay here.
    """

    sequences: tuple[str, ...] = ()
    where: str | None = None
    ids: Set[int] | None = None
    model: str | None = None
    since_us: int | None = None
    base: Set[bytes] | None = None
    max_bytes: int | None = None
    salted: bool = True


class Chosen(NamedTuple):
    """A block to be written: its row, its parent's, the number of its namespace, its hash and
    depth."""

    id: int
    parent_id: int | None
    namespace: int
    hash: bytes
    depth: int


@dataclass(frozen=True, slots=True)
class Plan:
    """``blocks`` in order, parents first; ``leaves`` hold all of them. ``salted`` namespaces with
    blocks were left out for their salt."""

    manifest: Manifest
    blocks: tuple[Chosen, ...]
    leaves: tuple[Chosen, ...]
    salted: int


class _Row(NamedTuple):
    id: int
    parent_id: int | None
    namespace_id: int
    hash: bytes
    hot: int
    last_access: int
    created_at: int
    token_count: int
    nbytes: int | None
    raw_nbytes: int | None
    codecs: str
    build_id: int | None
    has_tokens: int | None
    depth: int

    @property
    def cost(self) -> int:
        """At least what the block takes in a snapshot, in bytes."""
        parts = 1 + self.codecs.count(",")
        return (self.nbytes or 0) + 4 * self.token_count + MEMBER_OVERHEAD + parts * PART_OVERHEAD


def make_plan(store: Store, selection: Selection, *, tokens: bool, recoded: str | None) -> Plan:
    """Choose and order. Raises StoreMissing for a sequence or model that is not there, QueryError
    for a bad condition."""
    named_ids = selection.ids
    if selection.where is not None:
        found = ids_where(
            selection.where, partial(store.sql, limit=MAX_ROWS, deadline=WHERE_SECONDS)
        )
        named_ids = found if named_ids is None else found & named_ids
    with store.database.read() as connection:
        namespaces, salted = _namespaces(connection, selection)
        rows = {
            row.id: row
            for row in map(_Row._make, connection.execute(LIVE_BLOCKS))
            if row.namespace_id in namespaces
        }
        named = [row for row in connection.execute(NAMED) if row[1] in namespaces]
        wanted = _wanted(rows, named, selection.sequences, named_ids)
        chosen = _close(rows, wanted)
        chosen = {id_ for id_ in chosen if _is_new(rows[id_], selection)}
        if selection.max_bytes is not None:
            chosen = _hottest(rows, chosen, selection.max_bytes)
        used = {rows[id_].namespace_id for id_ in chosen}
        numbers = {id_: number for number, id_ in enumerate(i for i in namespaces if i in used)}
        blocks = tuple(_ordered(rows, chosen, numbers))
        manifest = Manifest(
            tuple(namespace_record(connection, id_).abroad() for id_ in numbers),
            _builds(connection, {rows[id_].build_id for id_ in chosen}, numbers),
            codec_notes(
                {codec for id_ in chosen for codec in rows[id_].codecs.split(",")}
                if recoded is None
                else {recoded, "raw"}
            ),
            tuple(
                NamedTip(name, numbers[namespace_id], rows[tip].hash, expires_at)
                for name, namespace_id, tip, expires_at in named
                if tip in chosen and (not selection.sequences or name in selection.sequences)
            ),
            tokens and all(rows[id_].has_tokens for id_ in chosen),
            recoded,
            len(blocks),
            sum(rows[id_].raw_nbytes or 0 for id_ in chosen),
        )
    parents = {block.parent_id for block in blocks}
    leaves = tuple(block for block in blocks if block.id not in parents)
    return Plan(manifest, blocks, leaves, salted)


def _builds(
    connection: Connection, used: Set[int | None], numbers: dict[int, int]
) -> tuple[BuildNote, ...]:
    """The builds that computed the chosen blocks, by namespace and digest."""
    found = [
        BuildNote(numbers[namespace_id], digest, description)
        for id_, namespace_id, digest, description in connection.execute(BUILDS)
        if id_ in used
    ]
    return tuple(sorted(found, key=lambda build: (build.namespace, build.digest)))


def ids_where(where: str, run: Callable[[str], SqlResult]) -> Set[int]:
    """Ids of the blocks of which a condition on block_usage holds; ``run`` runs it, sandboxed.
    Raises QueryError, UsageError."""
    # On lines of its own, so that a comment in the condition ends before the bracket does.
    result = run(f"SELECT id FROM block_usage WHERE (\n{where}\n)")  # noqa: S608 - sandboxed
    if result.columns != ("id",):
        raise UsageError("--where takes a condition on the columns of block_usage.")
    return {row[0] for row in result.rows}


def _namespaces(connection: Connection, selection: Selection) -> tuple[dict[int, bytes], int]:
    """The namespaces to look at, in order of their fingerprints, and how many are left out for
    their salt."""
    found = connection.execute(NAMESPACES).fetchall()
    model = selection.model
    if model is not None:
        found = [row for row in found if is_model(model, row[2], row[1])]
        if not found:
            raise StoreMissing(
                f"The store holds nothing of the model {model!r}; see kvdb ls namespaces."
            )
    left = 0 if selection.salted else sum(row[3] for row in found)
    kept = {row[0]: row[1] for row in found if selection.salted or not row[3]}
    return kept, left


def is_model(wanted: str, name: str, fingerprint: bytes) -> bool:
    """True when ``--model`` means this namespace: by its model's name, or by how its fingerprint
    begins."""
    return name == wanted or (len(wanted) >= 8 and fingerprint.hex().startswith(wanted.lower()))


def _wanted(
    rows: dict[int, _Row],
    named: Iterable[tuple[str, int, int, int | None]],
    sequences: tuple[str, ...],
    ids: Set[int] | None,
) -> Set[int]:
    wanted: set[int] = set(rows)
    if sequences:
        tips = {name: tip for name, _, tip, _ in named}
        missing = [name for name in sequences if name not in tips]
        if missing:
            raise StoreMissing(f"There is no sequence named {missing[0]!r} with state to export.")
        chains = {id_ for name in sequences for id_ in _chain(rows, tips[name])}
        # Of a chain with a hole, the blocks above it are of use too.
        wanted &= chains
    if ids is not None:
        wanted &= ids
    return wanted


def _chain(rows: dict[int, _Row], tip: int | None) -> Iterator[int]:
    while tip is not None and tip in rows:
        yield tip
        tip = rows[tip].parent_id


def _close(rows: dict[int, _Row], wanted: Iterable[int]) -> set[int]:
    """``wanted`` and all their ancestors; without those that a gap parts from their root."""
    rooted: dict[int, bool] = {}
    for id_ in wanted:
        path: list[int] = []
        at: int | None = id_
        while at is not None and at in rows and at not in rooted:
            path.append(at)
            at = rows[at].parent_id
        whole = at is None or rooted.get(at, False)
        rooted.update(dict.fromkeys(path, whole))
    return {id_ for id_, whole in rooted.items() if whole}


def _is_new(row: _Row, selection: Selection) -> bool:
    if selection.since_us is not None and row.created_at < selection.since_us:
        return False
    return selection.base is None or row.hash not in selection.base


def _hottest(rows: dict[int, _Row], chosen: set[int], max_bytes: int) -> set[int]:
    """As many of ``chosen`` as fit, the most useful first, each with its ancestors among them."""
    kept: set[int] = set()
    room = max_bytes - MANIFEST_ROOM
    order = sorted(chosen, key=lambda i: (-rows[i].hot, -rows[i].last_access, i))
    for id_ in order:
        path: list[int] = []
        at: int | None = id_
        while at is not None and at in chosen and at not in kept:
            path.append(at)
            at = rows[at].parent_id
        cost = sum(rows[i].cost for i in path)
        if cost <= room:
            kept.update(path)
            room -= cost
    return kept


def _ordered(rows: dict[int, _Row], chosen: set[int], numbers: dict[int, int]) -> Iterator[Chosen]:
    """Parents before children, chain after chain, by nothing but content: namespaces in order,
    roots and children by hash."""
    children: dict[int | None, list[int]] = {}
    roots: list[int] = []
    for id_ in chosen:
        parent = rows[id_].parent_id
        if parent in chosen:
            children.setdefault(parent, []).append(id_)
        else:
            roots.append(id_)

    def last_first(ids: list[int]) -> list[int]:
        return sorted(
            ids, key=lambda i: (numbers[rows[i].namespace_id], rows[i].hash), reverse=True
        )

    stack = last_first(roots)
    while stack:
        row = rows[stack.pop()]
        yield Chosen(row.id, row.parent_id, numbers[row.namespace_id], row.hash, row.depth)
        stack += last_first(children.get(row.id, []))
