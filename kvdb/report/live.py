"""What a page says that is looked at while the store works: the report's sections whose cost does
not grow with the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvdb.driver import Database
from kvdb.report import sections
from kvdb.report.history import HOUR_US, Scope, read_history
from kvdb.report.misses import costliest_misses, explainer
from kvdb.report.prefixes import parts_reached, shared_runs
from kvdb.report.sections import NamespaceSize, Section, Tile
from kvdb.report.tree import Decoder, read_beginnings

if TYPE_CHECKING:
    from kvdb.store import Store

# Namespaces whose prefixes are looked through: those that hold most.
MOST_NAMESPACES = 8
MOST_MISSES = 5


@dataclass(frozen=True, slots=True)
class Live:
    """What is said now, and when that was (Unix µs); figures have a bar for ``period_us``."""

    at_us: int
    period_us: int
    tiles: Sequence[Tile]
    sections: Sequence[Section]


def read_live(store: Store, scope: Scope, decoder: Decoder = lambda _: None) -> Live:
    """Read a store in short transactions. Without a decoder it says nothing of any prompt's text.
    Raises KvdbError where the store cannot be read."""

    with store.database.read() as connection:
        namespaces = sections.read_namespaces(connection, scope)
        history = read_history(connection, scope)
        used_bytes = store.limit.used(connection)
    names = {each.id: sections.namespace_name(each) for each in namespaces}
    made = [sections.NO_REQUESTS]
    if history is not None:
        made = [sections.tokens_section(history), sections.seconds_section(history)]
    capacity = sections.capacity_section(namespaces, used_bytes, store.limit.max_bytes)
    made.append(replace(capacity, figure=None, bars=sections.capacity_rows(namespaces)))
    made.append(_prefixes(store.database, namespaces, names, decoder))
    misses = costliest_misses(store.database, scope, explainer(store, decoder), MOST_MISSES)
    made.append(sections.misses_section(misses, names))
    held = sum(each.live_blocks for each in namespaces)
    tiles = sections.head_tiles(history, held, used_bytes)
    period_us = HOUR_US if history is None else history.period_us
    return Live(store.environment.now_us(), period_us, tiles, made)


def _prefixes(
    database: Database,
    namespaces: Sequence[NamespaceSize],
    names: Mapping[int, str],
    decoder: Decoder,
) -> Section:
    title = "What prompts have in common"
    largest = sorted(namespaces, key=lambda each: -each.live_bytes)[:MOST_NAMESPACES]
    with database.read() as connection:
        runs = shared_runs(connection, [each.id for each in largest])
    with database.read() as connection:
        beginnings = read_beginnings(connection, runs, decoder)
        reached = parts_reached(connection, runs)
    table = sections.prefix_table(runs, names, beginnings, reached)
    if table is None:
        return Section(title, ["Nothing is stored yet."])
    return Section(
        title,
        ["Stored prefixes up to where prompts part, those first that spared most tokens."],
        table=table,
    )
